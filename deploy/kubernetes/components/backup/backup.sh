#!/bin/sh
# Backs up spool, database and adapters, in this order, into a new folder of /backup; of older ones BACKUPS_KEPT stay.
# What has the name of a time is whole. Files that gateways and trainer delete meanwhile are in the database, or not needed.
set -eu
part="/backup/.part"
rm -rf "$part"
mkdir "$part"
pack() { # a file of the back-up, the folder that holds what is packed, its name there
  tar --create --file "$part/$1" --directory "$2" --warning=no-file-changed --warning=no-file-removed "$3" || [ $? -eq 1 ]
}
if [ -d "${SPOOL_PARENT:-/data/gateways}/spool" ]; then
  pack spool.tar "${SPOOL_PARENT:-/data/gateways}" spool
fi
pg_dump --format=custom --file="$part/database.dump" "$DATABASE_URL"
pack adapters.tar "${ADAPTERS_PARENT:-/data}" adapters
name=$(date -u +%Y-%m-%dT%H-%M-%SZ)
mv "$part" "/backup/$name"
echo "backed up: $name"
find /backup -mindepth 1 -maxdepth 1 -name '20*' | sort -r | tail -n "+$((${BACKUPS_KEPT:-7} + 1))" | while read -r old; do rm -r "$old"; done
