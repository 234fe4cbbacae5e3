"""Fine-tuning data: conversations from the formats people have, chat templates, and loss masks on the answers."""

from trainwright.data.chat.conversation import Conversation, Preference, TextPair, parse_row
from trainwright.data.chat.masks import Encoded, Masker, fit
from trainwright.data.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Conversation", "Encoded", "Masker", "Preference", "TextPair", "fit", "parse_row"]
