"""All tables; rows are imported from here, so that `Base.metadata` is complete.

Ids are UUIDs made by `clawloop.core.ids`; text columns with a closed set of values hold an enum of
`clawloop.core.contracts`.
"""

from db.declarative import Base as Base
from db.encryption.installation import EncryptionRow as EncryptionRow
from db.episodes.tables import CurriculumKindRow as CurriculumKindRow
from db.episodes.tables import EpisodeRow as EpisodeRow
from db.episodes.tables import RolloutGroupRow as RolloutGroupRow
from db.episodes.tables import RolloutsRow as RolloutsRow
from db.episodes.tables import SigningKeyRow as SigningKeyRow
from db.judging.tables import ComparisonRow as ComparisonRow
from db.judging.tables import FeedbackRequestRow as FeedbackRequestRow
from db.judging.tables import FeedbackRow as FeedbackRow
from db.judging.tables import HintRow as HintRow
from db.judging.tables import JudgementRow as JudgementRow
from db.judging.tables import JudgeTrialRow as JudgeTrialRow
from db.judging.tables import VoteRow as VoteRow
from db.lessons.tables import LessonRow as LessonRow
from db.lessons.tables import PracticeRow as PracticeRow
from db.lessons.tables import YardstickRow as YardstickRow
from db.serving.tables import ApiKeyRow as ApiKeyRow
from db.serving.tables import EngineRow as EngineRow
from db.serving.tables import EngineVersionRow as EngineVersionRow
from db.serving.tables import PolicyRow as PolicyRow
from db.serving.tables import StoredBytesRow as StoredBytesRow
from db.serving.tables import TemporalServerRow as TemporalServerRow
from db.serving.tables import VersionRow as VersionRow
from db.training.tables import EventRow as EventRow
from db.training.tables import GateCheckRow as GateCheckRow
from db.training.tables import ProbeRow as ProbeRow
from db.training.tables import RecipeRow as RecipeRow
from db.training.tables import SampleRow as SampleRow
from db.training.tables import StepRow as StepRow
from db.training.tables import StepSampleRow as StepSampleRow
from db.turns.tables import FileRow as FileRow
from db.turns.tables import PrefixRole as PrefixRole
from db.turns.tables import SessionPrefixRow as SessionPrefixRow
from db.turns.tables import SessionRow as SessionRow
from db.turns.tables import ToolListRow as ToolListRow
from db.turns.tables import TurnFileRow as TurnFileRow
from db.turns.tables import TurnRow as TurnRow
