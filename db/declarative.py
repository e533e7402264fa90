"""Base class of all tables: names of constraints, column types of Python types."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import ARRAY, CheckConstraint, Double, LargeBinary, MetaData, Text, Uuid
from sqlalchemy.dialects.postgresql import TIMESTAMP
from sqlalchemy.orm import DeclarativeBase


def one_of(column: str, values: type[StrEnum]) -> CheckConstraint:
    """A constraint that the column holds a value of the enum."""
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "%(table_name)s_%(column_0_N_name)s_idx",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
            "ck": "%(table_name)s_%(constraint_name)s_check",
            "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
            "pk": "%(table_name)s_pkey",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        str: Text,
        bytes: LargeBinary,
        list[str]: ARRAY(Text),
        list[UUID]: ARRAY(Uuid),
        float: Double,
        datetime: TIMESTAMP(timezone=True),
    }
