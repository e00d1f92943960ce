import json
from typing import Any

from starlette.requests import Request

from thermocline.server.limits import Limits


async def read_json(request: Request, limits: Limits) -> Any:
    return json.loads(await request.body())
