# make demo  sets everything up, shows the attention sinks of a real pretrained model and writes a page on it
# make figures MODEL=smollm2-135m  runs the analyses that have no result of MODEL yet and draws every figure
# make test  sets everything up and runs the tests
# A second run repeats no set-up. PYTHON names the interpreter the virtual environment is made with (3.11 or newer).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

MODEL ?= smollm2-135m

.PHONY: demo figures test test-oldest test-matrix test-slow lint clean

demo: $(INSTALLED)
	@$(BIN)/kvprobe pull smollm2-135m
	@mkdir -p demo
	@$(BIN)/kvprobe sinks smollm2-135m --plot demo/sinks.png
	@echo "The picture is demo/sinks.png. A page on the model comes next, in two or three minutes"
	@$(BIN)/kvprobe report smollm2-135m --out demo/report.html

# results and figures stay in results/ and figures/drawn/
figures: $(INSTALLED)
	$(if $(filter smollm2-135m gemma3-270m,$(MODEL)),@$(BIN)/kvprobe pull $(MODEL))
	@$(BIN)/python -m figures --missing "$(MODEL)" | xargs -r -t -L 1 $(BIN)/python -m
	@$(BIN)/python -m figures

# one torch thread a worker: two pools of threads on two cores only fight
test: $(INSTALLED)
	$(BIN)/kvprobe pull smollm2-135m
	$(BIN)/kvprobe pull gemma3-270m
	$(BIN)/kvprobe pull gpt2-tokenizer
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

# the other end of the supported versions: every dependency at its lower bound
test-oldest: $(INSTALLED)
	$(BIN)/nox -s oldest

test-matrix: $(INSTALLED)
	$(BIN)/nox
	$(BIN)/python -m analyses.releases --collect

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) demo figures/drawn

# torch first and by its exact version: anything that lets pip choose may fetch a GPU build of gigabytes
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Fetching torch and what else kvprobe needs into $(VENV): about 2.3 GB on disk; it takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,fast]'
	@touch $@
