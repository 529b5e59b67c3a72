"""How a request samples that does not say: as the model's generation_config.json recommends."""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.config import RouterConfig
from core.errors import ModelError, RequestError
from router.rules import check_sampling
from router.text.request import NEUTRAL, SamplingDefaults

FILE = "generation_config.json"


class _Recommended(msgspec.Struct, frozen=True):
    """The keys of the file that count; the same as in vLLM, but for max_new_tokens."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(config: RouterConfig, folder: Path) -> SamplingDefaults:
    """What the router takes for what a request leaves out.

    Raises ModelError where the file of the model cannot be read, or holds what no request may.
    """
    path = folder / FILE
    if config.sampling_defaults == "none" or not path.is_file():
        return NEUTRAL
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Recommended)
        given = {name: value for name, value in msgspec.structs.asdict(found).items() if value}
        if found.temperature is not None:
            given["temperature"] = found.temperature  # 0 is a value of its own: greedy
        if given.get("top_k") == -1:
            del given["top_k"]  # off
        defaults = SamplingDefaults(**given)
        check_sampling(defaults.params())
    except (OSError, msgspec.MsgspecError, RequestError) as error:
        raise ModelError(
            f"{path}: {error}: mend it, or ignore it with router.sampling_defaults=none"
        ) from error
    return defaults
