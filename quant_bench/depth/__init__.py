"""Depth routing: which earlier states each sublayer reads, in place of the residual sum. The two forms of "AttnRes"."""

from quant_bench.depth.arm import DepthArm as DepthArm
from quant_bench.depth.attnres import AttnResRouter as AttnResRouter
from quant_bench.depth.install import install as install
from quant_bench.depth.install import routers_of as routers_of
from quant_bench.depth.oasis import OasisRouter as OasisRouter
from quant_bench.depth.router import Read as Read
from quant_bench.depth.router import Router as Router
from quant_bench.depth.weigher import DepthRule as DepthRule
from quant_bench.depth.weigher import Weigher as Weigher
from quant_bench.mechanisms.install import Shape as Shape
