# Two commands matter: `make demo` runs the main job on a real model, `make test` passes the tests.
# Both set up what they need in .venv and need nothing but Python 3.11+, make and the package registry.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# an idle OpenMP thread that spins takes the core from the process beside it
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-all lint bench pictures results results-recipes results-arms results-depth clean help

help:
	@echo "make demo      set up, run SmolLM2-135M in float, W8A8 and W4A4, show the leaderboard (minutes)"
	@echo "make test      set up and run lint, types and tests (under 15 minutes)"
	@echo "make test-all  the same with the slow tests"
	@echo "make bench     speed ratios, measured side by side on this machine"
	@echo "make pictures  the site's look in docs/site (needs chromium)"
	@echo "make results   the committed records and leaderboard (hours; continues where it was stopped)"
	@echo "make results-recipes, results-arms, results-depth  the same for other recipes than rounding to nearest, for arms"
	@echo "               that are trained here, and for attention residuals"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "quant-bench needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	@touch $@

# torch first and pinned: a looser requirement would fetch gigabytes of GPU libraries that nobody asked for
$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed pyproject.toml
	$(PIP) install --constraint constraints.txt --group test --group lint
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/quant-bench demo

# processes that share the tests, one thread each: two threads in each of two processes would be slower than one
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
test: $(VENV)/.developed lint
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.developed lint
	$(PYTEST) -m "not gpu"

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.developed
	@missed=; for name in linear observe diagnostics harness arms depth gptq hadamard training recipes report pipeline; do \
	  $(BIN)/python benchmarks/$$name.py || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "not all that is wanted was reached by:$$missed"; exit 1; }

# the site's look in docs/, of the committed records; needs chromium
pictures: $(VENV)/.developed
	$(BIN)/python docs/site/pictures.py

# the committed records: hours on two cores, continued where it was stopped; needs QUANT_BENCH_DATA or the hub
MODEL := smollm2-135m-instruct
FAST := none w8a8-integer w8a8-static-integer w4a8-integer w4a4-integer w4a4g128-integer w8a16 w4a16
OTHER := w8a8 w8a8-static w4a8 w4a4 w4a4g128 w8a16-integer w4a16-integer
results: $(VENV)/.installed
	$(BIN)/quant-bench run $(MODEL) $(FAST:%=--quantizer %) --task wikitext2 --task outliers --task 'parity(limit=1)'
	$(BIN)/quant-bench run $(MODEL) $(FAST:%=--quantizer %) --task 'lambada(limit=1500)' --task hellaswag \
	  --task 'gsm8k(limit=50)' --task 'wikitext2(convention=p4)'
	$(BIN)/quant-bench run $(MODEL) $(OTHER:%=--quantizer %) --task wikitext2 --task outliers --task 'parity(limit=1)' \
	  --task 'wikitext2(convention=p4)'
	$(BIN)/quant-bench report

# other recipes, on fewer items (rounded to nearest and float again on these), each in its faster execution; without
# HellaSwag, of which 1,000 items do not tell w8a8 from float; torchao's are blocked until it is there (pip install torchao)
INTEGER := w8a8-integer w8a8-static-integer w4a8-integer w4a4-integer w4a4g128-integer
WEIGHTS := w4a16 w3a16
# one static range for a tensor, but only before products: the residual sums stay in float
PRODUCTS := w8a8-integer(activation_static=True,activation_granularity=tensor)
FEW := --task 'wikitext2(limit=40)' --task 'outliers(limit=40)' --task 'lambada(limit=500)'
RECIPES := none $(INTEGER) $(WEIGHTS) w6a6-integer w2a16 $(INTEGER:%=smoothquant:%) $(INTEGER:%=quarot:%) \
  $(WEIGHTS:%=quarot:%) $(foreach recipe,gptq awq,$(patsubst %,$(recipe):%,$(filter-out %static-integer,$(INTEGER)) $(WEIGHTS))) \
  $(foreach scheme,w4a8 w4a4 w4a4g128,quarot:$(scheme)-integer(weights=gptq)) \
  $(foreach scheme,w4a8-integer w4a4-integer w4a4g128-integer $(WEIGHTS),omniquant:$(scheme)(epochs=5)) \
  $(PRODUCTS) smoothquant:$(PRODUCTS) llm_int8:w8a8-integer $(WEIGHTS:%=hqq:%) hqq:w4a8-integer fp8 mxfp4 nvfp4 mxfp4a16 nvfp4a16 mixed:w4a16 quanto \
  torchao torchao(scheme=w4a16)
results-recipes: $(VENV)/.installed
	$(BIN)/quant-bench run $(MODEL) $(RECIPES:%=--quantizer '%') $(FEW)
	$(BIN)/quant-bench run $(MODEL) --quantizer none --task sensitivity --task 'attention(limit=8)'
	$(BIN)/quant-bench report

# arms, trained here: hours again; each run trains what is not in the cache
SEEDS := --seed 0 --seed 1 --seed 2
TOY_ARMS := softmax softmax1 sink_logit sink_token norm_gate projection_gate renorm combo combo2 clipped_softmax \
  clipped_softmax1 gated output_gate sparsemax entmax15 softpick norm_aware
MICRO_ARMS := softmax softmax1 sink_logit norm_gate projection_gate renorm combo combo2 clipped_softmax gated output_gate
UNDER := none w8a8-integer w8a8-static-integer w4a4-integer
results-arms: $(VENV)/.installed
	$(BIN)/quant-bench run tier:toy-3 $(SEEDS) $(TOY_ARMS:%=--arm %) $(UNDER:%=--quantizer %) --task validation \
	  --task 'attention(text=held_out)' --task 'outliers(text=held_out)' --task 'injection(text=held_out)'
	$(BIN)/quant-bench run tier:micro $(SEEDS) $(MICRO_ARMS:%=--arm %) $(UNDER:%=--quantizer %) --task validation \
	  --task wikitext2 --task attention --task outliers --task injection
	$(BIN)/quant-bench report

# attention residuals: models from scratch, then SmolLM2 trained on with routers that leave it as it is at the start
ROUTER := attnres_oasis
NULLS := softmax1+attnres_oasis(depth=softmax1
DEPTH_ARMS := softmax attnres attnres(form=block) $(ROUTER) softmax1+$(ROUTER) $(NULLS)) $(NULLS),coupled=True) \
  $(NULLS),coupled=True,beta=0.0,train_beta=False) $(NULLS),coupled=True,beta=0.5,beta_rate=100.0) \
  clipped_softmax+$(ROUTER)(depth=clipped) gated+$(ROUTER) sparsemax+$(ROUTER)(depth=sparsemax) \
  entmax15+$(ROUTER)(depth=entmax15)
KEPT := recency=last,rho=12.0,draw=zero_query
CONVERTED := softmax $(ROUTER)($(KEPT)) $(NULLS),$(KEPT)) $(NULLS),coupled=True,$(KEPT))
results-depth: $(VENV)/.installed
	$(BIN)/quant-bench run tier:toy-rope $(SEEDS) $(DEPTH_ARMS:%=--arm '%') $(UNDER:%=--quantizer %) --task validation \
	  --task 'outliers(text=held_out)' --task 'depth(text=held_out)' --task 'attention(text=held_out)'
	$(BIN)/quant-bench run tier:micro $(SEEDS) $(DEPTH_ARMS:%=--arm '%') $(UNDER:%=--quantizer %) --task validation \
	  --task wikitext2 --task outliers --task depth --task attention
	$(BIN)/quant-bench run tier:smollm2 $(CONVERTED:%=--arm '%') $(UNDER:%=--quantizer %) --task validation \
	  --task wikitext2 --task outliers --task depth
	$(BIN)/quant-bench report

clean:
	rm -rf $(VENV) build dist
