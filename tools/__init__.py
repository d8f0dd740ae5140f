"""Tools that keep the fork; none of them runs during training."""
