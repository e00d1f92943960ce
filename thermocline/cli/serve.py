"""`thermocline serve`. What is heavy is imported when it runs: the socket is open within a second."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.cli import report
from thermocline.cli.console import Progress, emit, emit_json, note, unfailing
from thermocline.cli.run import llm_options, sampling
from thermocline.cli.serve_options import ServeOptions
from thermocline.errors import Unsupported
from thermocline.server.http.limits import ServerLimits, described

if TYPE_CHECKING:
    from thermocline.server.http.listener import Listener


def serve(o: ServeOptions) -> int:
    if o.print_limits:
        return print_limits(o)
    from thermocline.server.http.listener import api_keys

    for library in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
        if importlib.util.find_spec(library) is None:
            raise Unsupported(f"{library} is not installed: pip install 'thermocline[server]'")
    keys = api_keys(o.api_key, None if o.api_key_file is None else Path(o.api_key_file))
    listener = listening(o, bool(keys))
    try:  # what is imported from here on takes a second, in which clients can connect already
        from thermocline.cli.conversation import text_of
        from thermocline.server import serve as server

        template = None if o.template is None else text_of(Path(o.template))
        options = llm_options(o, template, o.parallel)
        gc.freeze()  # what is there by now stays: to look through it again took 60 ms, within one large body
    except BaseException:
        listener.close()
        raise
    heard = unfailing(note)
    told: Callable[[str], None] = (lambda line: None) if o.quiet else heard
    told(f"listening on {listener.url}")
    with Progress(quiet=o.quiet) as progress:
        server.serve(
            options,
            listener,
            server.ServerOptions(limits_of(o), o.alias, sampling(o), keys, o.allow_host, o.allow_origin),
            note=told,
            log=heard if o.access_log else None,
            progress=unfailing(progress.at),
        )
    return 0


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
        emit(report.table([(str(x["flag"]), f"{x['value']} {x['unit']}") for x in found.values()]))
    return 0
