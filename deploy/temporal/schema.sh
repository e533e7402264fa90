#!/bin/sh
# Makes Temporal's two databases, or brings them to the schema of this image's version. Runs in temporalio/admin-tools,
# which reads the server's address and user from SQL_….
set -eu

schemas=/etc/temporal/schema/postgresql/v12
for kind in temporal visibility; do
    case $kind in temporal) database=temporal ;; visibility) database=temporal_visibility ;; esac
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0  # leaves a later version as it is
    temporal-sql-tool --db "$database" update-schema -d "$schemas/$kind/versioned"
done
