"""What `jaxcache demo` does: the same conversations without and with reuse."""

from jaxcache.demo.compare import (
    Comparison as Comparison,
    Difference as Difference,
    Run as Run,
    Settings as Settings,
    compare as compare,
)
from jaxcache.demo.conversations import (
    BadInput as BadInput,
    Conversation as Conversation,
)
from jaxcache.demo.dialogues import Dialogue as Dialogue, to_dialogue as to_dialogue
