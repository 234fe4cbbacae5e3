import pytest

from trainwright.data.build.documents import Document


@pytest.fixture
def open_documents():
    """Twelve documents of three sources under five licences."""
    licences = ["CC0 1.0", "cc-by-4.0", "CC BY-SA 4.0", "MIT", "public domain", "Apache-2.0"]
    return [
        Document(
            f"text number {i} of the collection\n" * 5, f"d{i}", ("books", "science", "code")[i % 3],
            f"https://site{i % 3}.example.org/{i}", licences[i % 6], {"language": "en", "creator": f"author {i}"},
        )
        for i in range(12)
    ]  # fmt: skip
