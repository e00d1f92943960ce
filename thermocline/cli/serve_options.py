"""The options of `thermocline serve`; every limit is one, too. Must not know what they do."""

from __future__ import annotations

from dataclasses import dataclass

from thermocline.cli.generation_options import Generation
from thermocline.cli.shared_options import json_output
from thermocline.options import nonempty, opt, switch, whole
from thermocline.server.http.limits import ServerLimits


@dataclass(frozen=True)
class ServeOptions(ServerLimits, Generation):
    """Serve a model over HTTP, as OpenAI's API, with a page to chat at."""

    host: str = opt("127.0.0.1", nonempty, "HOST", "Server", "Address to listen on.")
    port: int = opt(8080, whole(0, 65535), "N", "Server", "Port to listen on; 0 takes a free one.")
    socket: str | None = opt(
        None, nonempty, "PATH", "Server", "A UNIX socket in their place, for this user alone.", shown="none"
    )
    api_key: tuple[str, ...] = opt(
        (), nonempty, "KEY", "Server", "Clients need this key. May be repeated. Others see it in the list of "
        "processes: a file or THERMOCLINE_API_KEY is better.", repeat=True
    )  # fmt: skip
    api_key_file: str | None = opt(None, nonempty, "FILE", "Server", "Keys, one a line.", shown="none")
    insecure: bool = opt(False, switch, None, "Server", "Let other machines in without a key.")
    allow_host: tuple[str, ...] = opt(
        (),
        nonempty,
        "NAME",
        "Server",
        "Another name this server is reached by. May be repeated.",
        repeat=True,
    )
    allow_origin: tuple[str, ...] = opt(
        (), nonempty, "ORIGIN", "Server", "Pages of this origin may use it: https://example.org. May be "
        "repeated.", repeat=True
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
