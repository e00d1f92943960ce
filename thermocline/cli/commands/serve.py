"""`thermocline serve`: from flags to a server, whose socket is open within a second."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.cli.console import ProgressBar, emit, emit_json, unfailing
from thermocline.cli.generation import GenerationOptions, engine_options, model_options, sampling
from thermocline.cli.shared_options import json_output
from thermocline.cli.table import table
from thermocline.errors import Unsupported, UsageError
from thermocline.options import REPEATED, nonempty, opt, switch, whole
from thermocline.server.http.limits import ServerLimits, described

if TYPE_CHECKING:
    from thermocline.server.http.listener import Listener

log = logging.getLogger(__name__)

MODELS_MAX = 4  # loaded at once, unless asked for others


@dataclass(frozen=True)
class ServeOptions(ServerLimits, GenerationOptions):
    """Serve a model over HTTP, as OpenAI's API, with a page to chat at."""

    host: str = opt("127.0.0.1", nonempty, "HOST", "Server", "Address to listen on.")
    port: int = opt(8080, whole(0, 65535), "N", "Server", "Port to listen on; 0 takes a free one.")
    socket: str | None = opt(
        None, nonempty, "PATH", "Server", "A UNIX socket in their place, for this user alone.", shown="none"
    )
    api_key: tuple[str, ...] = opt(
        (), nonempty, "KEY", "Server", "Clients need this key. May be repeated. Others see it in the list of "
        "processes: a file or THERMOCLINE_API_KEY is better.", given=REPEATED
    )  # fmt: skip
    api_key_file: str | None = opt(None, nonempty, "FILE", "Server", "Keys, one a line.", shown="none")
    insecure: bool = opt(False, switch, None, "Server", "Let other machines in without a key.")
    allow_host: tuple[str, ...] = opt(
        (),
        nonempty,
        "NAME",
        "Server",
        "Another name this server is reached by. May be repeated.",
        given=REPEATED,
    )
    allow_origin: tuple[str, ...] = opt(
        (), nonempty, "ORIGIN", "Server", "Pages of this origin may use it: https://example.org. May be "
        "repeated.", given=REPEATED
    )  # fmt: skip
    models_dir: str | None = opt(
        None, nonempty, "DIR", "Server", "Serve the models in this directory (GGUF files, packs, Hugging "
        "Face directories), each loaded when a request names it. --model is for requests without a name, "
        "--ram the budget of all.", shown="one model"
    )  # fmt: skip
    models_max: int | None = opt(
        None, whole(1, 64), "N", "Server", "Models of --models-dir that are loaded at once, if they fit; the "
        "least recently used one makes room.", shown="4; 1 with --gpu"
    )  # fmt: skip
    alias: str | None = opt(
        None, nonempty, "NAME", "Server", "What the model is called to clients.", flags="-a", shown="its name"
    )
    parallel: int = opt(
        8, whole(1, 256), "N", "Server", "Answers that are computed together; more wait.", flags="-np"
    )
    template: str | None = opt(
        None, nonempty, "FILE", "Server", "A chat template (Jinja) in place of the model's own.",
        flags="--chat-template-file", shown="the model's"
    )  # fmt: skip
    access_log: bool = opt(False, switch, None, "Output", "A line on stderr for each request.")
    print_limits: bool = opt(False, switch, None, "Output", "Print every limit, and end.")
    json: bool = json_output()


def serve(o: ServeOptions) -> int:
    if o.print_limits:
        return print_limits(o)
    from thermocline.server.http.listener import api_keys

    check_server_installed()
    models_max = checked_models(o)
    keys = api_keys(o.api_key, None if o.api_key_file is None else Path(o.api_key_file))
    listener = listening(o, bool(keys))
    try:  # what is imported from here on takes a second, in which clients can connect already
        from thermocline.cli.conversation import text_of
        from thermocline.server import serve as server

        template = None if o.template is None else text_of(Path(o.template))
        files, options = model_options(o, template), engine_options(o, o.parallel)
        gc.freeze()  # what is there by now stays: to look through it again took 60 ms, within one large body
    except BaseException:
        listener.close()
        raise
    log.info(f"listening on {listener.url}")
    with ProgressBar(quiet=o.quiet) as progress:
        server.serve(
            files,
            options,
            listener,
            server.ServerOptions(
                limits_of(o),
                o.alias,
                sampling(o),
                keys,
                o.allow_host,
                o.allow_origin,
                o.access_log,
                None if o.models_dir is None else Path(o.models_dir),
                models_max,
            ),
            progress=unfailing(progress.at),
        )
    return 0


def checked_models(o: ServeOptions) -> int:
    """Return how many models may be loaded at once. Refuse options that do not go together."""
    if o.models_dir is None:
        if o.models_max is not None:
            raise UsageError("--models-max counts models of --models-dir; give that, or leave it out")
        return 1
    of_one = {"--alias": o.alias, "--template": o.template, "--activation": o.activation}
    for flag, value in of_one.items():
        if value is not None and o.model is None:
            raise UsageError(f"{flag} is about one model; name it with --model, or leave it out")
    if o.gpu != "off" and (o.models_max or 1) > 1:
        raise UsageError(
            f"--models-max {o.models_max} with --gpu {o.gpu}: models do not share a GPU; give --models-max 1"
        )
    return o.models_max or (MODELS_MAX if o.gpu == "off" else 1)


def check_server_installed() -> None:
    for library in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
        if importlib.util.find_spec(library) is None:
            raise Unsupported(f"{library} is not installed: pip install 'thermocline[server]'")


def listening(o: ServeOptions, has_keys: bool) -> Listener:
    from thermocline.server.http.listener import listen, listen_unix

    if o.socket is not None:
        return listen_unix(Path(o.socket))
    return listen(o.host, o.port, has_keys=has_keys, insecure=o.insecure)


def limits_of(o: ServeOptions) -> ServerLimits:
    return ServerLimits(**{f.name: getattr(o, f.name) for f in dataclasses.fields(ServerLimits)})


def print_limits(o: ServeOptions) -> int:
    found = described(limits_of(o))
    if o.json:
        emit_json(found)
    else:
        emit(table([(str(x["flag"]), f"{x['value']} {x['unit']}") for x in found.values()]))
    return 0
