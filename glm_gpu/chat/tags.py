"""GLM's markup of a reply; in its vocabulary each tag is one token.

<think>REASONING</think>CONTENT
<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>…
"""

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

# What `Tokenizer.stream(keep=REPLY_TAGS)` has to show for `ReplyParser` to see a reply's structure.
REPLY_TAGS = (THINK, END_THINK, CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
