import json


async def read_json(request, limits):
    return json.loads(await request.body())
