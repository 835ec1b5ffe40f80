"""What the driver says about clusters."""

import torch

from cuteforge.runtime import clusters


def test_the_driver_says_how_many_sms_clusters_reach(device):
    """Most of them, and never more than there are."""
    facts = torch.cuda.get_device_properties(device)
    if facts.major < 9:
        return  # nothing asks
    reached = clusters.reach_of(device.index, facts.multi_processor_count, facts.shared_memory_per_block_optin)
    assert facts.multi_processor_count * 3 // 4 <= reached <= facts.multi_processor_count
    assert reached % clusters.CLUSTER == 0
