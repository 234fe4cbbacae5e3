"""claims/<id>_<name>.yaml: what a paper claims, the small experiment that stands for it, when it counts as shown."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from trainwright.config.run_config import parse_yaml
from trainwright.core.errors import ConfigError, nearest
from trainwright.core.registry import config_error
from trainwright.lab.arms import Arm, check_arms, is_reference
from trainwright.lab.budget import Budget
from trainwright.lab.injection import Inject
from trainwright.lab.probes import label, parse_probe
from trainwright.lab.tuning import parse_grid, points

# Figures of a trial that a check may name, besides its probes.
TRIAL_QUANTITIES = (
    "val_loss", "train_loss", "tokens_per_s", "peak_memory_bytes", "optimizer_state_bytes", "params", "seconds",
)  # fmt: skip
# Those that need both arms: see lab.verdict.
DERIVED = ("tokens_to_loss", "seconds_to_loss", "diverged")
THRESHOLDS = ("less_by", "greater_by", "ratio_at_most", "ratio_at_least")


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ClaimArm(Part):
    """One arm of the experiment."""

    name: str = Field(min_length=1)
    role: Literal["method", "base", "control"]
    set: dict[str, Any] = Field(default_factory=dict, description="Dotted keys of the recipe and their values.")
    tune: dict[str, Any] | None = Field(
        None, description="Grid by key; a value {of: ARM, times: 1.25} takes ARM's tuned value instead."
    )
    share: float = Field(1.0, gt=0, le=1, description="Of the budget that the arm trains for.")

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without ``share`` where it is the whole budget: digests of claims are older than the field."""
        return {k: v for k, v in whole(self).items() if k != "share" or v != 1.0}

    def arm(self) -> Arm:
        """A reference may stand under ``tune`` too: it is where a rate comes from."""
        tune = self.tune or {}
        taken = {k: v for k, v in tune.items() if is_reference(v)}
        grid: dict[str, Sequence[Any]] = {k: parse_grid(v, k) for k, v in tune.items() if k not in taken}
        return Arm(self.name, {**self.set, **taken}, grid, self.role, self.share)


class Check(Part):
    """One comparison of two arms, by the paired difference (arm less versus) or the ratio (arm over versus).

    quantity  a figure, a probe, or two with `` - `` between them.
    strict    less and not equal.
    """

    quantity: str
    arm: str
    versus: str
    less_by: float | None = Field(None, description="The arm's is smaller by at least this; below 0: a tolerance.")
    greater_by: float | None = Field(None, description="The arm's is larger by at least this; below 0: a tolerance.")
    ratio_at_most: float | None = Field(None, gt=0)
    ratio_at_least: float | None = Field(None, gt=0)
    strict: bool = False

    @model_validator(mode="after")
    def _one_threshold(self) -> Check:
        given = [k for k in THRESHOLDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(THRESHOLDS)}; got {', '.join(given) or 'none'}")
        if self.arm == self.versus:
            raise ValueError("arm and versus are the same")
        return self

    @property
    def kind(self) -> str:
        return next(k for k in THRESHOLDS if getattr(self, k) is not None)

    @property
    def threshold(self) -> float:
        return float(getattr(self, self.kind))

    @property
    def parts(self) -> tuple[str, str | None]:
        first, sep, second = self.quantity.partition(" - ")
        return first.strip(), second.strip() if sep else None

    def words(self) -> str:
        """``val_loss of spam is less than that of adam by at least 0.05``."""
        t, strict = self.threshold, self.strict
        head = f"{self.quantity} of {self.arm}"
        if self.kind.startswith("ratio"):
            bound = {"ratio_at_most": "at most", "ratio_at_least": "at least"}[self.kind]
            if strict:
                bound = {"at most": "below", "at least": "above"}[bound]
            return f"{head} is {bound} {t:g} times that of {self.versus}"
        side, other = ("below", "above") if self.kind == "less_by" else ("above", "below")
        if t == 0:
            return f"{head} is {side}{'' if strict else ' or equal to'} that of {self.versus}"
        if t < 0:
            return f"{head} is {other} that of {self.versus} by no more than {-t:g}"
        return f"{head} is {side} that of {self.versus} by {'more than' if strict else 'at least'} {t:g}"


class Claim(Part):
    """A published claim and its experiment."""

    id: str = Field(min_length=1, description="Id of the method's card, e.g. B075.")
    method: str = Field(description="slot.name, e.g. optimizer.spam.")
    paper: str = Field(description="e.g. arXiv:2501.06842.")
    claim: str = Field(description="The paper's headline claim.")
    experiment: str = Field(description="The small experiment, in one sentence.")
    recipe: dict[str, Any] | str | None = Field(None, description="Mapping or file; null: the quickstart.")
    arms: list[ClaimArm] = Field(min_length=2)
    seeds: PositiveInt = 3
    budget: str | dict[str, Any]
    inject: Inject | None = None
    probes: list[Any] = Field(default_factory=list)
    checks: list[Check] = Field(min_length=1)
    cannot_show: str = Field(description="What this scale cannot show.")
    _path: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _fits_together(self) -> Claim:
        arms = [a.arm() for a in self.arms]
        check_arms(arms)
        Budget.parse(self.budget)
        names = [a.name for a in arms]
        sizes = {a.name: len(points(a.tune)) for a in arms if a.tune}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"tuned arms need the same number of points; got {sizes}")
        if not any(a.role == "base" for a in self.arms):
            raise ValueError("needs an arm with role base")
        known = {*TRIAL_QUANTITIES, *DERIVED}
        for probe in self.probes:
            name, settings = parse_probe(probe)
            known |= {name, label(name, settings)}
        for check in self.checks:
            for name in (check.arm, check.versus):
                if name not in names:
                    raise ValueError(f"a check names the arm {name!r}; {nearest(name, names)}")
            for quantity in check.parts:
                if quantity is not None and quantity not in known:
                    raise ValueError(f"a check names the quantity {quantity!r}; {nearest(quantity, known)}")
            if check.parts[1] is not None and set(check.parts) & set(DERIVED):
                raise ValueError(f"{check.quantity!r}: {', '.join(DERIVED)} cannot be subtracted")
        return self

    @property
    def baseline(self) -> str:
        return next(a.name for a in self.arms if a.role == "base")

    @property
    def name(self) -> str:
        """The file's name behind the id."""
        return self.method.rpartition(".")[2] if self._path is None else self._path.stem.partition("_")[2]

    def source(self) -> dict[str, Any] | Path | None:
        """The base recipe; a file is looked for beside the claim, then from here."""
        if not isinstance(self.recipe, str):
            return self.recipe
        beside = self._path.parent / self.recipe if self._path else None
        return beside if beside is not None and beside.is_file() else Path(self.recipe)

    @cached_property
    def digest(self) -> str:
        """Of what is run and judged, so that a result of another experiment is known as such; not of the prose."""
        prose = {"paper", "claim", "experiment", "cannot_show"}
        recipe = self.source()
        text = self.model_dump_json(exclude=prose) + (recipe.read_text("utf-8") if isinstance(recipe, Path) else "")
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load_claim(path: Path | str) -> Claim:
    """Read and check one file. Raises ConfigError that names the file, the key and the way out."""
    path = Path(path)
    try:
        data = parse_yaml(path.read_text("utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        claim = Claim.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {config_error(error, Claim)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    claim._path = path
    if not path.stem.startswith(f"{claim.id}_"):
        raise ConfigError(f"{path}: its name should begin with the id, {claim.id}_...yaml", key="id", value=claim.id)
    return claim


def load_claims(folder: Path | str) -> dict[str, Claim]:
    """Every claim in ``folder`` by its id, in the order of the ids. Raises ConfigError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}; give the one with the claims by --dir")
    out: dict[str, Claim] = {}
    for path in sorted(folder.glob("*.yaml")):
        claim = load_claim(path)
        if claim.id in out:
            raise ConfigError(f"{path}: the id {claim.id} is that of {out[claim.id]._path} too")
        out[claim.id] = claim
    return out


def pick(claims: dict[str, Claim], ids: Sequence[str]) -> list[Claim]:
    """The claims meant by ``ids``, which may be method names too. Raises ConfigError."""
    out = []
    for wanted in ids:
        found = [c for c in claims.values() if wanted in (c.id, c.name, c.method)]
        if not found:
            raise ConfigError(f"no claim {wanted!r}; {nearest(wanted, claims)}")
        out += [c for c in found if c not in out]
    return out
