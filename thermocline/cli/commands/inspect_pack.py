"""`thermocline inspect` and `verify`: what is in a pack, and whether all of it is whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import ProgressBar, emit, emit_json
from thermocline.cli.packs import formats_said, open_pack
from thermocline.cli.predictor_table import fidelity_rows
from thermocline.cli.shared_options import json_output, quiet_output, which_model
from thermocline.cli.table import size, table
from thermocline.errors import BadFile, ThermoclineError

if TYPE_CHECKING:
    from thermocline.pack.pack import Pack
    from thermocline.pack.stored_model import StoredModel


@dataclass(frozen=True)
class InspectOptions:
    """Say what is in a pack: the model, sizes per part, bytes per token."""

    model: str | None = which_model(positional=True)
    json: bool = json_output()


@dataclass(frozen=True)
class VerifyOptions:
    """Check every byte of a pack, and of what was made for it, against their checksums."""

    model: str | None = which_model(positional=True)
    json: bool = json_output()
    quiet: bool = quiet_output()


def inspect(o: InspectOptions) -> int:
    from thermocline.convert import from_gguf
    from thermocline.pack import pack as packs

    if o.model is not None and from_gguf.is_gguf(Path(o.model)):
        about, rows_of = from_gguf.inspect_gguf(Path(o.model)) | run_as(Path(o.model)), gguf_rows
    else:
        opened = open_pack(o.model)
        about, rows_of = packs.inspect(opened) | prepared(opened), pack_rows
    if o.json:
        emit_json(about)
    else:
        emit(table(rows_of(about)))
    return 0


def run_as(path: Path) -> dict[str, Any]:
    """Say whether a GGUF runs in place, and if not, why; null if it cannot be read as a model."""
    from thermocline.opening.gguf_model import open_gguf

    try:
        found = open_gguf(path)
    except ThermoclineError as e:
        return {"in_place": None, "why_packed": str(e), **left_on_disk(None)}
    if isinstance(found, str):
        return {"in_place": False, "why_packed": found, **left_on_disk(None)}
    return {"in_place": True, "why_packed": None, **left_on_disk(found)}


def left_on_disk(model: StoredModel | None) -> dict[str, Any]:
    """Return what of a model can be left on disk. None: one that does not run from these files."""
    if model is None:
        return {"experts": None, "streamed": None, "tables": []}
    return {"experts": experts_of(model), "streamed": streamed_of(model), "tables": tables_of_rows(model)}


def experts_of(model: StoredModel) -> dict[str, int] | None:
    """Return the experts that can be left on disk; None where there are none."""
    from thermocline.plan.disk.expert_split import Mixture
    from thermocline.plan.memory import reads_from_disk

    if reads_from_disk(model.spec) != "experts":
        return None
    m = Mixture(model.spec, model.tensors)
    largest = max(r.bytes for r in m.records.values())
    return {"layers": len(m.records), "each": model.spec.n_experts, "expert_bytes": largest, "bytes": m.bytes}


def streamed_of(model: StoredModel) -> dict[str, int] | None:
    """Return the FFNs whose rows can be left on disk; None where there are none."""
    from thermocline.plan.disk.dense_split import Dense
    from thermocline.plan.memory import reads_from_disk

    if reads_from_disk(model.spec) != "rows":
        return None
    d = Dense(model.spec, model.tensors)
    return {"layers": len(d.layers), "bytes": sum(p.left_bytes(0) for p in d.phases)}


def tables_of_rows(model: StoredModel) -> list[str]:
    """Return the tables of which a session reads rows from disk, however much memory there is."""
    from thermocline.plan.contents import tables_of

    return list(tables_of(model)[0])


def prepared(pack: Pack) -> dict[str, Any]:
    """Return what `profile` and `train` left in a pack, null where they did not; what stays on disk."""
    return {
        "profile": _profiled(pack),
        "predictors": _trained(pack),
        **left_on_disk(pack),
    }


def _profiled(pack: Pack) -> dict[str, Any] | None:
    from thermocline.pack.activity_profile import PROFILE, SAMPLES, open_profile, open_samples, summary

    if (found := open_profile(pack)) is None:
        return None
    keys = ("tokens", "corpus", "active_fraction", "hot_share", "never_active")
    about = {key: value for key, value in summary(found).items() if key in keys}
    about |= {"bytes": (pack.path / PROFILE).stat().st_size, "samples": 0, "samples_bytes": 0}
    samples = open_samples(pack)
    if samples is not None:
        with samples:
            about |= {"samples": samples.n, "samples_bytes": (pack.path / SAMPLES).stat().st_size}
    return about


def _trained(pack: Pack) -> dict[str, Any] | None:
    from thermocline.pack.predictor import FILE, open_predictors

    if not (pack.path / FILE).exists():
        return None
    found = open_predictors(pack)
    assert found is not None, "it exists"
    with found:
        layers = {kind: found.kinds.count(kind) for kind in sorted(set(found.kinds))}
        return {"bytes": found.nbytes, "layers_by_kind": layers, **found.report}


def pack_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    source = about["source"]
    rows = [
        ("pack", f"{about['path']} (version {about['version']})"),
        ("source", f"{source['name']} ({source['kind']}, {source['hash']})"),
        ("weights", f"{formats_said(about)}, {about['parameters'] / 1e6:,.2f} M parameters"),
        ("size", size(sum(about["files"].values()))),
        ("per token", f"{about['bytes_per_token_dense'] / 1e6:,.2f} MB, dense"),
        *_expert_rows(about.get("experts")),
        *_streamed_rows(about.get("streamed")),
        ("", ""),
    ]
    parts = about["parts"].items()
    rows += [(name, f"{size(p['bytes']):>10}  {p['parameters']:>14,} parameters") for name, p in parts]
    rows += [*_table_rows(about), ("", ""), *_format_rows(about["formats"]), ("", "")]
    if about["predictor"] is not None:
        ranks, threshold = about["predictor"]["ranks"], about["predictor"]["threshold"]
        rows.append(("predictor", f"ranks {min(ranks)} to {max(ranks)}, threshold {threshold:g}"))
    if sidecars := [*_profile_rows(about.get("profile")), *_predictor_rows(about.get("predictors"))]:
        rows += [*sidecars, ("", "")]
    rows += [(name, _plain(value)) for name, value in about["spec"].items()]
    return rows


def _table_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    return [("on disk", f"{name}, of which a token reads a row") for name in about.get("tables", ())]


def _format_rows(formats: dict[str, dict[str, int]]) -> list[tuple[str, str]]:
    return [
        (name, f"{size(f['bytes']):>10}  {f['parameters']:>14,} parameters  {f['tensors']:>5,} tensors")
        for name, f in formats.items()
    ]


def _expert_rows(e: dict[str, int] | None) -> list[tuple[str, str]]:
    if e is None:
        return []
    each = f"{e['each']} in each of {e['layers']} layers, of {size(e['expert_bytes'])}"
    return [("experts", f"{each}: {size(e['bytes'])} that may stay on disk")]


def _streamed_rows(s: dict[str, int] | None) -> list[tuple[str, str]]:
    return (
        [] if s is None else [("FFNs", f"in {s['layers']} layers: {size(s['bytes'])} that may stay on disk")]
    )


def _profile_rows(p: dict[str, Any] | None) -> list[tuple[str, str]]:
    if p is None:
        return []
    hot = f"{p['hot_share']:.1%} of the neurons make 80 % of the activations"
    rows = [("profile", f"{p['tokens']:,} tokens, {p['active_fraction']:.2%} active for one; {hot}")]
    rows.append(("corpus", p["corpus"]))
    if p["samples"]:
        rows.append(("samples", f"{p['samples']:,} tokens, {size(p['samples_bytes'])}"))
    return rows


def _predictor_rows(p: dict[str, Any] | None) -> list[tuple[str, str]]:
    if p is None:
        return []
    layers = ", ".join(f"{kind} in {n} layers" for kind, n in p["layers_by_kind"].items())
    return [
        ("trained", f"{size(p['bytes'])} of predictors: {layers}"),
        *(fidelity_rows(p) if "kld" in p else []),
    ]


def gguf_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (about["kind"], f"{about['path']} ({about['parts']} file{'s' * (about['parts'] > 1)})"),
        *((k, _plain(about[k])) for k in ("name", "architecture", "tokenizer")),
        ("size", f"{size(about['file_bytes'])}, {about['parameters'] / 1e6:,.2f} M parameters"),
        ("predictors", f"{about['predictors']} layers, threshold {_plain(about['sparse_threshold'])}"),
        ("runs", _runs(about)),
        *_expert_rows(about["experts"]),
        *_streamed_rows(about["streamed"]),
        *_table_rows(about),
        ("", ""),
    ]
    return rows + _format_rows(about["types"])


def _runs(about: dict[str, Any]) -> str:
    if about["in_place"] is None:
        return f"not at all: {about['why_packed']}"
    return "in place" if about["in_place"] else f"as a pack: {about['why_packed']}"


def _plain(value: Any) -> str:
    match value:
        case None | () | []:
            return "none"
        case list() | tuple():
            return ", ".join(map(str, value))
        case dict():
            return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


def verify(o: VerifyOptions) -> int:
    from thermocline.pack import pack as packs
    from thermocline.pack import sidecar

    opened = open_pack(o.model)
    with ProgressBar(quiet=o.quiet) as progress:
        blocks = packs.verify(opened, partial(progress.at, "verifying"))
    problems = blocks + (beside := list(sidecar.problems(opened.path)))
    if o.json:
        emit_json({"path": str(opened.path), "ok": not problems, "problems": problems})
    else:
        emit(
            "".join(f"{line}\n" for line in problems) or f"{opened.path}: ok, {size(opened.weights_bytes)}\n"
        )
    if blocks:
        raise BadFile(f"{opened.path}: {len(blocks)} damaged block{'s' * (len(blocks) > 1)}; pack it again")
    if beside:
        raise BadFile(f"{opened.path}: what was made for it is damaged; remove it, or make it again")
    return 0
