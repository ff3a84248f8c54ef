"""Sampling parameters of a request, with the checkpoint's defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from moonpool.conductor.api.errors import bad_request
from moonpool.conductor.api.schemas import GenerationBody
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.request import SamplingParams
from moonpool.conductor.text.checkpoint_json import read_json
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.structure.grammars import Structure

_SEED_MASK = 2**64 - 1
# As good as the best token alone. Less may be 0 in the float32 of messages, which means off.
_LEAST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults: those of the checkpoint's ``generation_config.json``, then OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_checkpoint(cls, path: Path) -> SamplingDefaults:
        """Raises ``ConfigError`` if the file is invalid."""
        file = path / "generation_config.json"
        given = read_json(file)
        found: dict[str, float] = {}
        for name in (field.name for field in fields(cls)):
            value = given.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{file}: {name} must be a number, got {value!r}", "model.path")
            found[name] = value
        return cls(**found)  # type: ignore[arg-type]

    def params(
        self,
        body: GenerationBody,
        model: ServedModel,
        *,
        max_tokens: int,
        num_logprobs: int,
        choice: int,
        structure: Structure | None = None,
    ) -> SamplingParams:
        """Parameters of the ``choice``-th of ``n`` choices; each has another seed.

        Raises:
            ApiError: 400 for a token id outside the vocabulary.
        """
        for token_id in body.stop_token_ids:
            _check_token("stop_token_ids", token_id, model)
        given = {field.name: getattr(body, field.name) for field in fields(self)}
        chosen = {name: getattr(self, name) if value is None else value for name, value in given.items()}
        chosen["top_k"] = max(chosen["top_k"], 0)  # -1 means off, too
        chosen["top_p"] = max(chosen["top_p"], _LEAST_TOP_P)
        return SamplingParams(
            max_tokens=max_tokens,
            **chosen,
            seed=None if body.seed is None else (body.seed + choice) & _SEED_MASK,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_logit_bias(body, model),
            num_logprobs=num_logprobs,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            min_tokens=min(body.min_tokens, max_tokens),
            structure=structure,
            speculation=body.speculation,
        )


def _logit_bias(body: GenerationBody, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in body.logit_bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 20:
            raise bad_request(f"logit_bias: keys must be token ids, got {key[:64]!r}", "logit_bias")
        _check_token("logit_bias", int(key), model)
        bias[int(key)] = value
    return bias


def _check_token(param: str, token_id: int, model: ServedModel) -> None:
    if token_id >= model.vocab_size:
        raise bad_request(
            f"{param}: token id {token_id} is outside the model's vocabulary, 0 to {model.vocab_size - 1}",
            param,
        )
