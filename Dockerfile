# meshwright as a command: docker build -t meshwright .
# docker run --rm --network none --user "$(id -u):$(id -g)" -v "$PWD:/work" meshwright plan ...
# Nothing is fetched at run time; the build needs a package index.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
# Packages that `pyproject.toml` calls extras, such as mcp or parquet, between commas.
ARG EXTRAS=mcp
COPY --from=build /wheels /wheels
# Dependencies in the ranges of pyproject.toml, at the versions that the tests ran with.
COPY requirements-dev.lock /wheels/
RUN python -m pip install --no-cache-dir --disable-pip-version-check \
      --constraint /wheels/requirements-dev.lock "$(echo /wheels/*.whl)[${EXTRAS}]" \
    && rm -r /wheels \
    && useradd --uid 10001 --create-home planner \
    && install --directory --owner planner /work
# A home that whoever runs it may write, whatever --user says: kept answers of batches go there.
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
