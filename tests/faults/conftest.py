"""What these tests need of the machine, as the agent's do."""

from tests.unit.agent.conftest import tmpfs_may_be_mounted as tmpfs_may_be_mounted
