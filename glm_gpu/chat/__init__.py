"""Messages to a prompt, and a model's text back to reasoning, content, and tool calls."""

from glm_gpu.chat.reply import Delta, Reply, ReplyParser, ToolCall, ends_in_reasoning, parse_reply
from glm_gpu.chat.stop import StopMatcher, eos_ids
from glm_gpu.chat.tags import REPLY_TAGS
from glm_gpu.chat.template import ChatTemplate

__all__ = [
    "REPLY_TAGS",
    "ChatTemplate",
    "Delta",
    "Reply",
    "ReplyParser",
    "StopMatcher",
    "ToolCall",
    "ends_in_reasoning",
    "eos_ids",
    "parse_reply",
]
