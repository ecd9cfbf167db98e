"""Conversion of a checkpoint between Hugging Face's form and torch_dist, as a flow: what `millrace convert` does, on a worker."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from millrace.connectors.trainers.megatron.conversion.conversion import Conversion
from millrace.connectors.trainers.megatron.conversion.sources import Form
from millrace.flows.driver.conversion_order import DType, order_of


@flow(name="convert", flow_run_name="{target}")
def convert(
    source: str,
    target: str,
    model: str | None = None,
    to: Form | None = None,
    dtype: DType | None = None,
    file_gib: float = 4.0,
    verify: bool = True,
    merge: bool = False,
) -> str:
    """Convert a checkpoint; the same target goes on from its finished files.

    Args:
        source: Hugging Face folder or name, or torch_dist folder: a run's checkpoints/NNNNNN, or one of Megatron-LM or slime.
        target: New folder.
        model: Hugging Face folder that describes a torch_dist source; a run's checkpoint and an output of this flow need none.
        to: Form of the target; by default the other one.
        dtype: Type of all weights; by default as they are stored.
        file_gib: Size of a weight file, about.
        verify: Read both back and compare them bit for bit.
        merge: The source is a folder of adapters: add them to the weights that they belong to, which `model` may name.
    """
    conversion = Conversion(order_of(source, target, model, to, dtype, file_gib, merge))
    written = write(conversion)
    if verify:
        compare(conversion)
    return written


@task(name="write", cache_policy=NO_CACHE)
def write(conversion: Conversion) -> str:
    """Write the files that are not there yet; returns the outcome in words."""
    return conversion.convert().line


@task(name="compare", cache_policy=NO_CACHE)
def compare(conversion: Conversion) -> None:
    """Read source and target, and compare every tensor."""
    conversion.verify()
