# Training on GPUs, on Paddle's own image: choose a tag that fits your driver and has Python 3.11 or later.
#   docker build -f docker/training.Dockerfile --build-arg IMAGE=paddlepaddle/paddle:TAG -t galvatron .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work galvatron gpu-check
ARG IMAGE=paddlepaddle/paddle:3.3.1-gpu-cuda12.9-cudnn9.9
FROM ${IMAGE}
RUN python -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'this tag has an older Python than 3.11; choose another')"
WORKDIR /source
COPY . .
# PaddleNLP's own list of dependencies cannot be installed today: docs/en/installation.md
RUN python -m pip install --no-cache-dir ".[gpu]" && python -m pip install --no-cache-dir --no-deps paddlenlp==3.0.0b4
WORKDIR /work
ENTRYPOINT ["galvatron"]
