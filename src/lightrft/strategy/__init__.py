"""What a trainer imports. Nothing here loads torch; the first strategy that is built does."""

from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.fake_strategy import FakeStrategy, get_fake_strategy
from lightrft.strategy.protocol import Strategy
from lightrft.strategy.strategy import get_strategy

__all__ = ["FakeStrategy", "Strategy", "StrategyConfig", "get_fake_strategy", "get_strategy"]
