"""Parts of attention mechanisms, and how arms install them: the plain definitions are in the arms themselves."""

from quant_bench.mechanisms.core import GateBias as GateBias
from quant_bench.mechanisms.core import KeyLengthBias as KeyLengthBias
from quant_bench.mechanisms.core import Mechanism as Mechanism
from quant_bench.mechanisms.gates import HeadGate as HeadGate
from quant_bench.mechanisms.gates import NormGate as NormGate
from quant_bench.mechanisms.gates import OutputGate as OutputGate
from quant_bench.mechanisms.gates import ProjectionGate as ProjectionGate
from quant_bench.mechanisms.install import add_key_bias as add_key_bias
from quant_bench.mechanisms.install import add_null as add_null
from quant_bench.mechanisms.install import add_output_gate as add_output_gate
from quant_bench.mechanisms.install import add_read_gate as add_read_gate
from quant_bench.mechanisms.install import learning_rates as learning_rates
from quant_bench.mechanisms.install import set_normalizer as set_normalizer
from quant_bench.mechanisms.install import undecayed as undecayed
from quant_bench.mechanisms.sink_token import add_sink_token as add_sink_token
