# Planning on CPUs: search, fit, explain, reports. No Paddle.
#   docker build -f docker/planning.Dockerfile -t galvatron-planning .
#   docker run --rm -v "$PWD":/work galvatron-planning search llama2-7b --device a100-80gb --gpus 8
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --wheel-dir /wheels .

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
WORKDIR /work
ENTRYPOINT ["galvatron"]
