"""Every error that quant-bench raises on purpose.

```text
QuantBenchError
├── SpecError(ValueError)             a spec string cannot be read, or a setting is unknown or out of range
├── UnknownPlugin(LookupError)        no arm, quantizer or task of that name
├── PluginError(TypeError)            a plugin file breaks its contract
├── ModelError(ValueError)            a model cannot be loaded, or its layout is not supported
│   └── UnsafeModel                   pickle weights or custom code, refused unless allowed
├── DataError(ValueError)             a data file is not what its name says (digest, rows)
├── RecordError(ValueError)           a record is not valid, or does not lie where its content says
├── QuantizationError(RuntimeError)   a quantizer cannot do what was asked (coverage, shapes, not finite)
├── KernelError(RuntimeError)         no exact integer kernel for these operands on this machine
├── Blocked                           something is missing: the cell is recorded as `blocked`
└── NotApplicable                     the question makes no sense here: recorded as `not_applicable`
```
"""


class QuantBenchError(Exception):
    """Base of all errors below."""


class SpecError(QuantBenchError, ValueError):
    """A spec string cannot be read, or one of its settings is unknown or out of range."""


class UnknownPlugin(QuantBenchError, LookupError):
    """No plugin of that kind has that name."""


class PluginError(QuantBenchError, TypeError):
    """A plugin file breaks its contract."""


class ModelError(QuantBenchError, ValueError):
    """A model cannot be loaded, or its layout is not supported."""


class UnsafeModel(ModelError):
    """Loading would unpickle weights or run code that came with the model."""


class DataError(QuantBenchError, ValueError):
    """A data file is not what its name says."""


class RecordError(QuantBenchError, ValueError):
    """A record is not valid, or does not lie where its content says."""


class QuantizationError(QuantBenchError, RuntimeError):
    """A quantizer cannot do what was asked."""


class KernelError(QuantBenchError, RuntimeError):
    """No exact integer kernel for these operands on this machine."""


class Blocked(QuantBenchError):
    """Something is missing; the message names it and says how to supply it."""


class NotApplicable(QuantBenchError):
    """The question makes no sense for this model and quantizer; the message says why."""
