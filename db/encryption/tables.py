"""The row that says that a database is encrypted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from db.declarative import Base


class EncryptionRow(Base):
    """The content of this database is encrypted; one row or none. While it is there, PostgreSQL takes no plain text."""

    __tablename__ = "encryption"
    __table_args__ = (CheckConstraint("only_row", name="only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    check_value: Mapped[bytes]  # only the right keys open it
    since: Mapped[datetime] = mapped_column(server_default=text("now()"))
