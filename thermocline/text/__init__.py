"""Text into token ids and back: tokenizers, chat templates, grammars."""
