# The quickstart in a container:   docker build -t hvdcompress . && docker run --rm hvdcompress
# A shell in it:                   docker run --rm -it hvdcompress bash
#
# The image is made by the same launch/setup.sh that makes .venv/ on a machine. The project is not tested with a container
# engine: please report what does not work.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git iproute2 \
    && rm -rf /var/lib/apt/lists/*

# In a container one is root, which Open MPI refuses unless told twice. The last makes ranks that wait yield their core.
ENV OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_mpi_yield_when_idle=1

# PyTorch to install, as launch/setup.sh --help describes it; pip's own variables may be given in the same way.
ARG HVDCOMPRESS_TORCH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

COPY . /hvdcompress
WORKDIR /hvdcompress
RUN ./launch/setup.sh && rm -rf ~/.cache
ENV PATH=/hvdcompress/.venv/bin:$PATH
# Otherwise the first training in each container compiles the kernels.
RUN hvdcompress doctor --warm

CMD ["./launch/quickstart.sh"]
