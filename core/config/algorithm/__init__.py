"""The `algorithm` section: advantage, loss, correction, aggregation and KL, each chosen on its own."""

from millrace.core.config.algorithm.advantage import Advantage as Advantage
from millrace.core.config.algorithm.advantage import AdvantageFunction as AdvantageFunction
from millrace.core.config.algorithm.advantage import Critic as Critic
from millrace.core.config.algorithm.advantage import Gae as Gae
from millrace.core.config.algorithm.advantage import GroupRelative as GroupRelative
from millrace.core.config.algorithm.advantage import LeaveOneOut as LeaveOneOut
from millrace.core.config.algorithm.advantage import MaxRl as MaxRl
from millrace.core.config.algorithm.advantage import NoAdvantage as NoAdvantage
from millrace.core.config.algorithm.advantage import ReinforcePlusPlus as ReinforcePlusPlus
from millrace.core.config.algorithm.advantage import ReinforcePlusPlusBaseline as ReinforcePlusPlusBaseline
from millrace.core.config.algorithm.loss import Cispo as Cispo
from millrace.core.config.algorithm.loss import Clipped as Clipped
from millrace.core.config.algorithm.loss import Gspo as Gspo
from millrace.core.config.algorithm.loss import Loss as Loss
from millrace.core.config.algorithm.loss import LossFunction as LossFunction
from millrace.core.config.algorithm.loss import Reinforce as Reinforce
from millrace.core.config.algorithm.loss import Sapo as Sapo
from millrace.core.config.algorithm.loss import Sft as Sft
from millrace.core.config.algorithm.section import Algorithm as Algorithm
from millrace.core.config.algorithm.section import Correction as Correction
from millrace.core.config.algorithm.section import Overlong as Overlong
