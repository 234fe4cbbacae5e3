"""Context parallelism: a row's tokens are spread over ranks, in one of several ways (slot ``context``)."""
