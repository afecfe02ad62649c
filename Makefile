# The entry points of the project; README names them. Each sets up what it needs.
PY := .venv/bin/python
# Tests of these kinds need more than Python; the rest is the unit part.
UNIT := not simulated and not process and not spark and not api and not cluster and not kubelet and not external
# A group is a file, whose tests share what they start, or all that use the shared control plane. Tests on the embedded
# cluster have the machine alone.
PROGRAMS := (simulated or process or spark or api) and not cluster and not kubelet and not external
# `make nightly` has time for all of them.
LONG := and not long
CORES := $(shell nproc)
# Many of these wait for programs, sockets and the API server.
PROGRAM_WORKERS := $(shell expr $(CORES) + 1)
# An environment that forbids it would have each process compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# What mypy knows of unchanged files is the same in every clone.
export MYPY_CACHE_DIR := $(or $(REKINDLE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rekindle)/mypy

.PHONY: setup tools lint unit programs test nightly failures e2e smoke cluster demo chaos fuzz simulate mutants bench bench-planner bench-recovery bench-recovery-real bench-dpc bench-cec bench-flux bench-kafka nexmark images reference clean lock

setup:            ## the Python environment
	@tools/setup

tools: setup      ## Kubernetes, etcd and helm built from pinned Go modules; a JDK
	@$(PY) -m rekindle_testing.embedded.toolchain

lint: setup       ## style, types, layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# Without pytest's own compilation of assertions, which takes longer than most files' tests; what fails runs once more
# with it, so that its values are shown.
unit: setup       ## pure cores: milliseconds each
	@$(PY) -m pytest -q -n $(CORES) --dist worksteal -m "$(UNIT)" --assert=plain $(PYTEST_ARGS) || \
		($(PY) -m pytest -q -m "$(UNIT)" --last-failed --last-failed-no-failures none $(PYTEST_ARGS); false)

programs: tools   ## histories in simulated time, Spark, whole programs, and what needs an API server alone
	$(PY) -m pytest -n $(PROGRAM_WORKERS) --dist loadgroup -m "$(PROGRAMS) $(LONG)" $(PYTEST_ARGS)

test: lint tools  ## all that CI runs but smoke: lint, unit tests, simulations, programs, whole topologies on a cluster
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory simulate SEEDS=16
	@$(MAKE) --no-print-directory programs
	$(PY) -m pytest -m "cluster $(LONG)"

nightly: tools    ## everything there is, with more examples, and one summary: STEPS="unit chaos"
	@$(PY) -m rekindle_testing.nightly $(if $(STEPS),--steps $(STEPS))

# Another cluster is used only if it is asked for: its tests are not even collected without NODES.
EXTERNAL := $(filter existing,$(NODES))
FAILURES := $(if $(EXTERNAL),external,$(if $(filter kubelet,$(NODES)),kubelet,not kubelet and not external))

failures: $(if $(EXTERNAL),setup,tools) ## whole topologies under kill -9, freezes and lost nodes: NODES=kubelet, existing
	$(PY) -m pytest -m "failures and ($(FAILURES))"

e2e: tools        ## on real kubelets and containerd, as root: not part of `make test`
	@$(PY) -m rekindle_testing.embedded.kubelet_node prepare
	@.venv/bin/rekindle warm-up
	$(PY) -m pytest -m "kubelet and not long and not smoke" --durations=30

smoke: tools      ## what CI runs too: the images, and one loss on real kubelets; says why where this machine cannot
	$(PY) -m pytest -m smoke

cluster: tools    ## an embedded cluster with Rekindle to play with, until Ctrl-C: NODES=5 KAFKA=1
	@$(PY) -m rekindle_testing.console $(if $(NODES),--nodes $(NODES)) $(if $(KAFKA),--kafka)

demo: tools       ## the main job on the embedded cluster, end to end; AGAIN=1: with a second loss in the middle of the recovery
	$(PY) -m rekindle_testing.demo $(if $(AGAIN),--lose-again)

chaos: tools      ## random faults on the embedded cluster: SEED="1 2" ROUNDS=8 FAULTS="nodes leader" STANDBYS=1
	@$(PY) -m rekindle_testing.chaos --seed $(or $(SEED),1) --rounds $(or $(ROUNDS),3) $(if $(FAULTS),--only $(FAULTS)) \
		$(if $(STANDBYS),--standbys $(STANDBYS))

fuzz: tools       ## generated manifests for the API server and the operator: COUNT=2000 SEED=1 FIRST=0
	@$(PY) -m rekindle_testing.fuzz --count $(or $(COUNT),2000) --seed $(or $(SEED),1) --first $(or $(FIRST),0)

simulate: setup   ## whole topologies in simulated time, with faults: SEEDS=500 FIRST=1200 SCHEDULE="one of the fixed ones"
	@$(PY) -m rekindle_testing.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST),--first $(FIRST)) \
		$(if $(SCHEDULE),--schedule "$(SCHEDULE)")

mutants: setup    ## bugs that are planted in the product: simulations have to find each; NAME="..." for one
	@$(PY) -m rekindle_testing.simulation.mutants $(if $(NAME),--names "$(NAME)")

bench: tools      ## the benchmarks, with tables under build/bench
	$(PY) benchmarks/run.py

bench-planner: setup ## what the planner finds and proves, with a table under build/bench: ARGS="--only heavy --solver-seconds 60"
	$(PY) benchmarks/planner.py $(ARGS)

bench-kafka: tools ## Kafka under kill -9, latency from topic to topic, a long replay: RUNS=20 SECONDS=60 COUNT=20000000 PARTITIONS=100
	$(PY) benchmarks/kafka_faults.py --runs $(or $(RUNS),20)
	$(PY) benchmarks/kafka_latency.py --seconds $(or $(SECONDS),60)
	$(PY) benchmarks/kafka_replay.py --count $(or $(COUNT),20000000) --partitions $(or $(PARTITIONS),100)

bench-recovery: setup ## the experiments of progressive recovery in simulated time, with tables and pictures under build/bench
	cd benchmarks && ../$(PY) -m progressive $(ARGS)

bench-recovery-real: tools ## of these, a small one on ten process nodes, beside the model; nodes that join: ARGS="--modes Progressive"
	cd benchmarks && ../$(PY) -m progressive.real $(ARGS)
	cd benchmarks && ../$(PY) -m progressive.ready

bench-flux: tools ## replicas killed and rebuilt, throughput meanwhile, state moved: KILLS=30 MEGABYTES="10 100 1000"
	$(PY) benchmarks/replica_kills.py --kills $(or $(KILLS),30)
	$(PY) benchmarks/catch_up.py
	$(PY) benchmarks/state_movement.py --megabytes $(or $(MEGABYTES),10 100 1000)

bench-dpc: tools  ## DPC's experiments, with tables and pictures under build/bench/dpc: ARGS="--seconds 5 --policies Process/Process"
	cd benchmarks && ../$(PY) -m dpc $(ARGS)

bench-cec: tools   ## CEC's experiments with one task, with tables under build/bench: ARGS="--scale 0.1 --cores 2"
	cd benchmarks && ../$(PY) -m cec $(ARGS)

nexmark: tools    ## queries of Nexmark over generated auctions and bids, compared with DuckDB: EVENTS=100000
	rm -rf build/nexmark
	$(PY) examples/nexmark/generate.py build/nexmark/input --events $(or $(EVENTS),100000)
	.venv/bin/rekindle run examples/nexmark/topology.yaml --input build/nexmark/input --output build/nexmark/output
	$(PY) examples/nexmark/check.py build/nexmark/input build/nexmark/output

images: setup     ## the container images, built, measured and started once each: ENGINE=podman BASE=... ARCHIVES=1
	@$(PY) -m rekindle_testing.images

reference: setup  ## docs/reference.md, from the CRD and the classes of the spec
	$(PY) tools/reference.py

COMPILE := .venv/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	-c build/constraints.txt
# Rich is for the command line, which the operator's image has not, and needs these for code and Markdown alone.
NOT_IN_IMAGES := --no-emit-package markdown-it-py --no-emit-package mdurl --no-emit-package pygments
# The operator loads neither these nor Rich (docs/decisions/0036-two-images.md).
NOT_IN_OPERATOR := --no-emit-package numpy --no-emit-package pyarrow --no-emit-package rich --no-emit-package rekindle

lock:             ## resolve the dependencies anew into requirements.lock, and those of each image into images/
	@mkdir -p build
	.venv/bin/uv export -q --all-groups --all-packages --no-emit-workspace --no-header -o requirements.lock
	sed -n 's/^\([A-Za-z0-9._-]*==[^\\]*\).*/\1/p' requirements.lock > build/constraints.txt
	$(COMPILE) images/build.in -o images/build.lock
	$(COMPILE) pipelines/pyproject.toml --extra spark --extra s3 --extra gcs --extra kafka $(NOT_IN_IMAGES) -o images/pipelines.lock
	$(COMPILE) operator/pyproject.toml $(NOT_IN_IMAGES) $(NOT_IN_OPERATOR) -o images/operator.lock

clean:
	rm -rf build .venv
