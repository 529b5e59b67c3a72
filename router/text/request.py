"""The nouns of the front door: what every front asks for, and what it gets back."""

from __future__ import annotations

from typing import Any

import msgspec

from core.errors import ModelNotFound
from core.wire import FinishReason, SamplingParams
from router.echo import quoted

# What one request may ask for, over any protocol.
MAX_STOPS = 16
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000  # either way from 0


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that the model's chat template turns into a prompt."""

    messages: tuple[dict[str, Any], ...]  # opaque: checked by ChatTemplate.render
    template_args: dict[str, Any] = {}  # opaque: more variables for the template


# Text, token ids, or a conversation.
Prompt = str | tuple[int, ...] | ChatPrompt


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in text. ``FrontDoor`` checks it, turns it into token streams and back."""

    rid: str
    prompts: tuple[Prompt, ...]
    n: int = 1  # choices of each prompt; choice i of prompt p has index p * n + i
    max_new_tokens: int | None = None  # None: the rest of the context; 0 needs echo
    sampling: SamplingParams  # of it, max_new_tokens and seed are replaced
    seed: int | None = None  # choice i samples with seed + i; None: one is drawn
    stops: tuple[str, ...] = ()
    include_stop: bool = False  # show the stop string
    skip_special: bool = True  # do not show special tokens
    echo: bool = False  # give the prompt back with the first event of each choice
    timeout_s: float | None = None  # from arrival; then every choice ends with ABORT
    cache_salt: str = ""  # cached prefixes are shared only where it is the same
    priority: int = 0  # higher goes first
    caller: str = ""  # who asks (router/keys.py)
    trace: str = ""  # the traceparent that came with it
    client_id: str = ""  # what its client calls it, where that is not ``rid``; any text


class Token(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One token in words a client understands."""

    token_id: int
    data: bytes  # what it stands for; may be part of a character

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")


class TokenText(Token, frozen=True, kw_only=True, gc=False):
    """A token and how likely it was."""

    logprob: float


class ChosenToken(TokenText, frozen=True, kw_only=True, gc=False):
    """A token of the output or of the prompt with the alternatives to it, best first."""

    top: tuple[TokenText, ...] = ()
    offset: int = 0  # characters of its choice's text before it, with the prompt where echoed


class PromptText(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt as it goes back to the caller."""

    text: str = ""  # where it is echoed
    first: Token  # it follows nothing, so it has no probability
    rest: tuple[ChosenToken, ...] = ()  # all other tokens, where prompt_logprobs were asked for


class TextEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became known of one choice. The last event of each choice has ``finish``."""

    index: int
    text: str = ""  # whole characters only
    token_ids: tuple[int, ...] = ()  # behind ``text`` and what is held back of it
    logprobs: tuple[ChosenToken, ...] = ()  # one for each token id, where asked for
    finish: FinishReason | None = None
    matched_stop: str | int | None = None  # the stop string, or the id of the stop token
    # with the first event of a choice, where echo or prompt_logprobs were asked for
    prompt: PromptText | None = None


class TextUsage(msgspec.Struct, kw_only=True):
    """What a whole request cost so far. Grows while the request runs."""

    prompt_tokens: int = 0  # each prompt once, whatever n is
    completion_tokens: int = 0  # of all choices
    cached_tokens: int = 0  # of the prompts, found in a prefix cache


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator lets one request have; the keys of RouterConfig."""

    max_output_tokens: int = 0  # of one choice; 0: the context
    max_choices: int = MAX_CHOICES  # of all prompts together
    request_timeout_s: float = 0.0  # from arrival; 0: none
    salt_by_key: bool = False  # each caller is a cache tenant


DEFAULT_TERMS = Terms()


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for each of these that a request leaves out; the fields of SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def params(self, **asked: Any) -> SamplingParams:  # opaque: fields of SamplingParams
        """Of a request that asks for these; None is the same as nothing."""
        given = {name: value for name, value in asked.items() if value is not None}
        limit = 0  # the front door knows the context
        return SamplingParams(max_new_tokens=limit, **(msgspec.structs.asdict(self) | given))


NEUTRAL = SamplingDefaults()


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the front door must know of the model behind it."""

    name: str  # what clients send as "model"
    aliases: tuple[str, ...] = ()  # what they may send as well
    context_len: int  # tokens of one request, prompt and output
    vocab_size: int  # token ids of a prompt are in [0, vocab_size)
    eos_token_ids: frozenset[int] = frozenset()
    created: int = 0  # epoch seconds
    sampling: SamplingDefaults = NEUTRAL  # of requests that do not say

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once, the model's own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    def check_name(self, name: str, param: str | None = None) -> None:
        """Raise ModelNotFound unless ``name`` is one of them; ``param`` is where it was said."""
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise ModelNotFound(
                f"the model {quoted(name)} does not exist: this server has {known}", param=param
            )
