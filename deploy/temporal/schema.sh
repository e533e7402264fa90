#!/bin/sh
# Creates Temporal's two databases, or migrates them to the schema of this image's version. Idempotent. Runs in
# temporalio/admin-tools; temporal-sql-tool reads host, port, user and password from SQL_… variables.
set -eu

schemas=/etc/temporal/schema/postgresql/v12
for kind in temporal visibility; do
    case $kind in temporal) database=temporal ;; visibility) database=temporal_visibility ;; esac
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0  # a no-op on a later version
    temporal-sql-tool --db "$database" update-schema -d "$schemas/$kind/versioned"
done
