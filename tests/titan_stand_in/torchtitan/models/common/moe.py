from torch import nn


class GroupedExperts(nn.Module):
    pass
