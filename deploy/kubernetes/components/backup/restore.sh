#!/bin/sh
# Restores a back-up, the newest one unless an argument or BACKUP names another, into empty folders and a database without
# sessions: a migrated one in which nobody has chatted yet is replaced. With KEEP_ADAPTERS=yes the folder of adapters may hold
# versions, as where the database alone was lost: each file of it stays as it is, and those that it lacks are added.
# All of Clawloop's processes are stopped meanwhile; afterwards run `clawloop check` and `clawloop recover`.
set -eu
backups=$(find /backup -mindepth 1 -maxdepth 1 -name '20*' -exec basename {} ';' | sort)
name="${1:-${BACKUP:-$(echo "$backups" | tail -n 1)}}"
from="/backup/$name"
if [ -z "$name" ] || [ ! -f "$from/database.dump" ]; then
  echo "there is no back-up '$name': $(echo "$backups" | tr '\n' ' ')" >&2
  exit 1
fi
ask() { psql --no-psqlrc --tuples-only --no-align --command "$1" "$DATABASE_URL"; }
# A failed question ends the script: it must not be taken for an empty answer.
held=$(ask "SELECT to_regclass('sessions')")
if [ -n "$held" ]; then
  held=$(ask "SELECT 1 FROM sessions LIMIT 1")
fi
if [ -n "$held" ]; then
  echo "the database has sessions: restore into a new one, so that nothing is lost" >&2
  exit 1
fi
if [ "${KEEP_ADAPTERS:-no}" != yes ] && [ -n "$(ls "${ADAPTERS_PARENT:-/data}/adapters")" ]; then
  echo "the folder of adapters is not empty: restore into a new one, so that nothing is lost; or, where it is whole, set" \
    "KEEP_ADAPTERS=yes, and what it lacks is added" >&2
  exit 1
fi
tar --extract --file "$from/adapters.tar" --directory "${ADAPTERS_PARENT:-/data}" --skip-old-files
if [ -f "$from/spool.tar" ] && [ -d "${SPOOL_PARENT:-/data/gateways}" ]; then
  tar --extract --file "$from/spool.tar" --directory "${SPOOL_PARENT:-/data/gateways}"
fi
# Last: where it fails, the database is as it was, and the folders can be emptied.
pg_restore --exit-on-error --single-transaction --clean --if-exists --no-owner --dbname="$DATABASE_URL" "$from/database.dump"
echo "restored: $name"
