# Thermocline with Ray: head, worker or command of a cluster (docs/guide/cluster.md).
FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ cmake ninja-build \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim-bookworm
COPY --from=build /wheels /wheels
RUN wheel=$(ls /wheels/thermocline-*.whl) \
    && pip install --no-cache-dir "$wheel[cluster]" \
    && rm -r /wheels \
    && useradd --create-home thermocline
USER thermocline
WORKDIR /home/thermocline
ENV RAY_USAGE_STATS_ENABLED=0
CMD ["thermocline", "--help"]
