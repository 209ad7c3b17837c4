"""Text to tokens and back: a model's own tokenizer, text that comes token by token, and texts that end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qsync_opt.errors import ModelError, NotInstalledError, UnsupportedError, first_line
from qsync_opt.runtimes.torch.serving.config import DecoderConfig

_UNFINISHED = "\ufffd"
"""What stands for bytes that are no whole character yet."""


class Tokenizer:
    """The tokenizer of a model, by transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that a prompt begins with."""
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation up to where the answer begins.

        Raises:
            UnsupportedError: The model has no chat template, or it refuses these messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise UnsupportedError("this model has no chat template; use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as failure:  # templates raise what they like
            raise UnsupportedError(
                f"the model's chat template refuses the messages: {first_line(failure)}"
            ) from failure
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The token that ends a text, if there is one."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)


def load_tokenizer(model: str | Path, config: DecoderConfig) -> Tokenizer | None:
    """The tokenizer in a model's folder or GGUF file, or None where the folder has none.

    Raises:
        ModelError: It cannot be read, or it has more tokens than the model.
        NotInstalledError: transformers is missing.
    """
    path = Path(model)
    if path.suffix != ".gguf" and not any(path.glob("tokenizer*")):
        return None
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as missing:
        raise NotInstalledError("tokenizers need transformers: pip install 'qsync-opt[serving]'") from missing
    try:
        if path.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as failure:  # transformers raises whatever a damaged file makes it stumble over
        raise ModelError(f"the tokenizer of {path} cannot be read: {first_line(failure)}") from failure
    if tokenizer.vocab_size > config.vocabulary:
        raise ModelError(
            f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, but the model {config.vocabulary}; it belongs "
            "to another model, put the model's own tokenizer there"
        )
    return Tokenizer(tokenizer)


class TextStream:
    """Text of tokens that come one by one, held back while a character or a stop text may be under way.

    Args:
        tokenizer: Of the model; None: the text is the token numbers, each with a space behind it.
        stops: Texts that end the whole; they and what follows are left out.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._begin = self._shown = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown after one more token."""
        if self._tokenizer is None:
            return f"{token} "
        if self.stopped:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._shown])
        text = self._tokenizer.decode(self._tokens[self._begin :])
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        # Tokens join differently at the start of a text, so the last shown ones stay in front.
        self._begin, self._shown = self._shown, len(self._tokens)
        return self._show(text[len(before) :])

    def finish(self) -> str:
        """What was held back."""
        if self._tokenizer is None or self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._begin : self._shown])
        rest = self._held + self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
        self._held = ""
        return rest

    def _show(self, text: str) -> str:
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        begun = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
