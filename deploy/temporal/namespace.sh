#!/bin/sh
# Creates Clawloop's namespace, with 30 days of retention. Idempotent. Runs in temporalio/admin-tools, with the server's
# address in TEMPORAL_ADDRESS.
set -eu

until temporal operator cluster health; do sleep 2; done
temporal operator namespace describe --namespace default \
    || temporal operator namespace create --namespace default --retention 720h
