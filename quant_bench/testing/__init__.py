"""The contracts of plugins, executable: `check_arm`, `check_quantizer` and `check_task` raise with what is broken."""

from quant_bench.testing.arms import check_arm as check_arm
from quant_bench.testing.quantizers import check_quantizer as check_quantizer
from quant_bench.testing.tasks import check_task as check_task
from quant_bench.testing.tokens import tiny_calibration as tiny_calibration
from quant_bench.testing.tokens import tiny_ids as tiny_ids
from quant_bench.tiny import tiny_model as tiny_model
from quant_bench.tiny import tiny_tokenizer as tiny_tokenizer
