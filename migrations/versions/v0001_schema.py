"""All tables; once a database is encrypted, it refuses plain content.

Names of keys that are not given are PostgreSQL's own, which `db.declarative` gives as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

_SERVING = """
CREATE TABLE recipes (
    hash text PRIMARY KEY,
    name text NOT NULL,
    signal_hash text NOT NULL,
    train_hash text NOT NULL,
    content json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE policies (
    id text PRIMARY KEY,
    base_model text NOT NULL,
    aliases text[] NOT NULL,
    sampling json NOT NULL,
    head integer NOT NULL,
    active integer NOT NULL,
    epoch integer NOT NULL DEFAULT 0,
    pinned integer,
    pool text NOT NULL DEFAULT 'default',
    rejections integer NOT NULL DEFAULT 0,
    canary integer,
    canary_share double precision,
    canary_since timestamptz,
    paused_reason text,
    paused_at timestamptz,
    work_waiting boolean NOT NULL DEFAULT false,
    work_signalled_at timestamptz,
    recipe_hash text REFERENCES recipes,
    general_known integer,
    verdict_count integer NOT NULL DEFAULT 0,
    verdict_total integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    retired_at timestamptz
);

CREATE TABLE versions (
    policy text REFERENCES policies,
    n integer,
    parent integer,
    path text,
    sha256 bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    activated_at timestamptz,
    retired_at timestamptz,
    removed_at timestamptz,
    held_out_scores json,
    wanted_until timestamptz,
    origin_policy text,
    origin_n integer,
    lora_rank integer,
    lora_alpha double precision,
    PRIMARY KEY (policy, n),
    FOREIGN KEY (origin_policy, origin_n) REFERENCES versions,
    FOREIGN KEY (policy, parent) REFERENCES versions,
    CONSTRAINT versions_lora_check CHECK ((lora_rank IS NULL) = (lora_alpha IS NULL)),
    CONSTRAINT versions_origin_check CHECK ((origin_policy IS NULL) = (origin_n IS NULL)),
    CONSTRAINT versions_base_check CHECK ((n = 0) = (parent IS NULL) AND (n = 0) = (path IS NULL))
);

CREATE TABLE engines (
    id text PRIMARY KEY,
    url text NOT NULL UNIQUE,
    draining boolean NOT NULL DEFAULT false,
    problem text,
    added_by text,
    added_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE engine_versions (
    engine_id text REFERENCES engines ON DELETE CASCADE,
    policy text,
    version integer,
    loaded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (engine_id, policy, version),
    FOREIGN KEY (policy, version) REFERENCES versions
);

CREATE TABLE temporal_server (
    only_row boolean DEFAULT true PRIMARY KEY,
    namespace_id text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now(),
    forgotten_at timestamptz,
    CONSTRAINT temporal_server_only_row_check CHECK (only_row)
);
"""

_EPISODES = """
CREATE TABLE rollouts (
    policy text PRIMARY KEY REFERENCES policies,
    environment text NOT NULL,
    group_size integer NOT NULL,
    groups_in_flight integer NOT NULL,
    barren_limit integer NOT NULL,
    next_task integer NOT NULL DEFAULT 0,
    paused_reason text,
    curriculum boolean NOT NULL DEFAULT false,
    started_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT rollouts_barren_limit_check CHECK (barren_limit >= 1),
    CONSTRAINT rollouts_group_size_check CHECK (group_size >= 2),
    CONSTRAINT rollouts_groups_in_flight_check CHECK (groups_in_flight >= 1)
);

CREATE TABLE rollout_groups (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    environment text NOT NULL,
    task text NOT NULL,
    kind text,
    level integer,
    size integer NOT NULL,
    state text NOT NULL,
    reason text,
    scored integer,
    mean_reward double precision,
    created_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    CONSTRAINT rollout_groups_state_check CHECK (state IN ('open', 'settled', 'dropped')),
    CONSTRAINT rollout_groups_finished_check CHECK ((finished_at IS NULL) = (state = 'open')),
    CONSTRAINT rollout_groups_size_check CHECK (size >= 2),
    CONSTRAINT rollout_groups_kind_check CHECK ((kind IS NULL) = (level IS NULL))
);
CREATE INDEX rollout_groups_kind_idx ON rollout_groups (policy, environment, kind, level, id) WHERE kind IS NOT NULL;
CREATE INDEX rollout_groups_policy_id_idx ON rollout_groups (policy, id);

CREATE TABLE episodes (
    id uuid PRIMARY KEY,
    group_id uuid NOT NULL REFERENCES rollout_groups,
    place integer NOT NULL,
    attempt integer NOT NULL,
    state text NOT NULL,
    ending text,
    reward double precision,
    advantage double precision,
    reason text,
    artifact_sha256 bytea,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    UNIQUE (group_id, place, attempt),
    CONSTRAINT episodes_ended_check CHECK ((state = 'running') = (ended_at IS NULL)),
    CONSTRAINT episodes_scored_check CHECK ((state = 'scored') = (reward IS NOT NULL)),
    CONSTRAINT episodes_state_check CHECK (state IN ('running', 'ended', 'scored', 'unscored', 'abandoned')),
    CONSTRAINT episodes_ending_check CHECK (ending IN (
        'completed', 'truncated_turns', 'truncated_tokens', 'truncated_time', 'agent_error', 'infrastructure'
    ))
);
CREATE INDEX episodes_running_idx ON episodes (id) WHERE state = 'running';

CREATE TABLE curriculum_kinds (
    policy text REFERENCES policies,
    environment text,
    kind text,
    level integer NOT NULL,
    weight double precision NOT NULL,
    patience integer NOT NULL,
    trial_of integer,
    success_before double precision,
    why text NOT NULL DEFAULT '',
    changed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (policy, environment, kind),
    CONSTRAINT curriculum_kinds_weight_check CHECK (weight > 0),
    CONSTRAINT curriculum_kinds_trial_check CHECK ((trial_of IS NULL) = (success_before IS NULL)),
    CONSTRAINT curriculum_kinds_levels_check CHECK (level >= 1 AND (trial_of >= 1) IS NOT FALSE)
);

CREATE TABLE signing_keys (
    name text PRIMARY KEY,
    secret bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
"""

_TURNS = """
CREATE TABLE api_keys (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    policies text[] NOT NULL DEFAULT '{}',
    name text NOT NULL,
    prefix text NOT NULL UNIQUE,
    secret_sha256 bytea NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    expires_at timestamptz,
    requests_per_minute integer,
    tokens_per_minute integer,
    concurrency integer,
    stored_mib integer,
    episode_id uuid REFERENCES episodes
);

CREATE TABLE stored_bytes (
    api_key_id uuid,
    id bigint GENERATED BY DEFAULT AS IDENTITY,
    bytes bigint NOT NULL,
    PRIMARY KEY (api_key_id, id)
);

CREATE TABLE sessions (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    api_key_id uuid NOT NULL REFERENCES api_keys,
    external_id text,
    identified_by text NOT NULL,
    state text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    last_turn_at timestamptz NOT NULL,
    first_closed_at timestamptz,
    closed_at timestamptz,
    closed_why text,
    guarantee text,
    task_outcome integer,
    erased_at timestamptz,
    CONSTRAINT sessions_task_outcome_check CHECK (task_outcome IN (-1, 1)),
    CONSTRAINT sessions_state_check CHECK (state IN ('open', 'ending', 'closed'))
);

CREATE TABLE tool_lists (
    sha256 bytea PRIMARY KEY,
    tools json NOT NULL
);

CREATE TABLE turns (
    id uuid PRIMARY KEY,
    session_id uuid NOT NULL REFERENCES sessions,
    parent_turn_id uuid REFERENCES turns,
    matched_by text,
    group_id uuid,
    choice integer NOT NULL,
    kind text NOT NULL,
    kind_reason text NOT NULL,
    status text NOT NULL,
    error text,
    outcome text NOT NULL,
    outcome_detail text,
    alias text NOT NULL,
    version integer NOT NULL,
    engine_id text,
    evidence json NOT NULL,
    messages_kept integer NOT NULL,
    messages_added json NOT NULL,
    tools_sha256 bytea REFERENCES tool_lists,
    response json,
    response_digest bytea,
    reply_digest bytea,
    asked_digest bytea,
    prompt_shared integer,
    prompt_ids bytea,
    response_ids bytea,
    logprobs bytea,
    sampling json NOT NULL,
    stored_bytes bigint NOT NULL,
    finish_reason text,
    ends_session boolean NOT NULL,
    started_at timestamptz NOT NULL,
    finished_at timestamptz NOT NULL,
    entered_at timestamptz NOT NULL DEFAULT now(),
    announced_at timestamptz,
    episode_id uuid REFERENCES episodes,
    lessons uuid[],
    erased_at timestamptz,
    CONSTRAINT turns_kept_of_parent_check CHECK (parent_turn_id IS NOT NULL OR messages_kept = 0),
    CONSTRAINT turns_prompt_known_check CHECK ((prompt_shared IS NULL) = (prompt_ids IS NULL)),
    CONSTRAINT turns_status_check CHECK (status IN ('complete', 'length', 'aborted', 'error')),
    CONSTRAINT turns_kind_check CHECK (kind IN ('main', 'side', 'practice')),
    CONSTRAINT turns_matched_by_check CHECK (matched_by IN ('context', 'place', 'reply')),
    CONSTRAINT turns_outcome_check CHECK (outcome IN (
        'waiting', 'side', 'no_feedback', 'not_trainable', 'unjudged', 'undecided', 'sampled', 'held_out', 'trained',
        'expired', 'quarantined', 'rolled_back', 'erased'
    )),
    CONSTRAINT turns_ids_are_whole_check CHECK (
        octet_length(prompt_ids) % 4 IN (0, 2) AND octet_length(response_ids) % 4 IN (0, 2)
    ),
    CONSTRAINT turns_logprob_per_id_check CHECK (logprobs IS NULL OR (
        response_ids IS NOT NULL
        AND (octet_length(logprobs) - CASE WHEN octet_length(logprobs) % 4 = 2 THEN 34 ELSE 0 END) IN (
            (octet_length(response_ids) - CASE WHEN octet_length(response_ids) % 4 = 2 THEN 34 ELSE 0 END),
            2 * (octet_length(response_ids) - CASE WHEN octet_length(response_ids) % 4 = 2 THEN 34 ELSE 0 END)
        )
    )),
    CONSTRAINT turns_parent_is_older_check CHECK (parent_turn_id < id),
    CONSTRAINT turns_shared_with_parent_check CHECK (parent_turn_id IS NOT NULL OR prompt_shared = 0)
);
CREATE INDEX turns_lessons_idx ON turns USING gin (lessons) WHERE lessons IS NOT NULL;
CREATE INDEX turns_episode_idx ON turns (episode_id, id) WHERE episode_id IS NOT NULL;
CREATE INDEX turns_group_idx ON turns (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX turns_parent_turn_id_idx ON turns (parent_turn_id);
CREATE INDEX turns_session_id_id_idx ON turns (session_id, id) INCLUDE (kind);
CREATE INDEX turns_session_id_reply_digest_id_idx ON turns (session_id, reply_digest, id);
CREATE INDEX turns_session_id_response_digest_id_idx ON turns (session_id, response_digest, id);
CREATE INDEX turns_tools_idx ON turns (tools_sha256) WHERE tools_sha256 IS NOT NULL;
CREATE INDEX turns_trained_idx ON turns (session_id, id) WHERE outcome IN ('trained', 'rolled_back');
CREATE INDEX turns_unannounced_idx ON turns (id) WHERE announced_at IS NULL AND kind = 'main' AND episode_id IS NULL;
CREATE INDEX turns_waiting_idx ON turns (session_id) WHERE outcome = 'waiting';

CREATE TABLE session_prefixes (
    api_key_id uuid REFERENCES api_keys,
    prefix_hash bytea,
    turn_id uuid REFERENCES turns ON DELETE CASCADE,
    role text NOT NULL,
    PRIMARY KEY (api_key_id, prefix_hash, turn_id),
    CONSTRAINT session_prefixes_role_check CHECK (role IN ('request', 'reply', 'expected'))
);

CREATE TABLE files (
    id uuid PRIMARY KEY,
    digest bytea NOT NULL UNIQUE,
    size_bytes integer NOT NULL,
    content bytea STORAGE EXTERNAL NOT NULL, -- pictures are compressed already
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT files_content_is_padded_check CHECK (octet_length(content) % 4 IN (0, 2))
);

CREATE TABLE turn_files (
    turn_id uuid REFERENCES turns ON DELETE CASCADE,
    file_id uuid REFERENCES files,
    PRIMARY KEY (turn_id, file_id)
);
CREATE INDEX turn_files_file_id_idx ON turn_files (file_id);
"""

_JUDGING = """
CREATE TABLE judgements (
    id uuid PRIMARY KEY,
    turn_id uuid NOT NULL REFERENCES turns,
    recipe_hash text NOT NULL REFERENCES recipes,
    revision integer NOT NULL,
    shown_by uuid REFERENCES turns,
    evidence_hash bytea NOT NULL,
    verdict integer,
    expected double precision,
    reward double precision,
    verdict_why text,
    hint text,
    hint_why text,
    not_trainable text,
    outcome text,
    why text,
    opened_at timestamptz NOT NULL DEFAULT now(),
    decided_at timestamptz,
    UNIQUE (turn_id, recipe_hash, revision),
    CONSTRAINT judgements_verdict_check CHECK (verdict BETWEEN -1 AND 1),
    CONSTRAINT judgements_decided_check CHECK ((decided_at IS NULL) = (outcome IS NULL))
);

CREATE TABLE votes (
    judgement_id uuid REFERENCES judgements,
    kind text,
    index integer,
    raw text NOT NULL,
    score integer,
    answered_at timestamptz NOT NULL DEFAULT now(),
    asked_turn uuid,
    asked_choice integer,
    rewarded_at timestamptz,
    PRIMARY KEY (judgement_id, kind, index),
    CONSTRAINT votes_asked_check CHECK ((asked_turn IS NULL) = (asked_choice IS NULL)),
    CONSTRAINT votes_score_check CHECK (score BETWEEN -1 AND 1)
);
CREATE INDEX votes_unrewarded_idx ON votes (judgement_id) WHERE asked_turn IS NOT NULL AND rewarded_at IS NULL;

CREATE TABLE hints (
    judgement_id uuid REFERENCES judgements,
    kind text,
    index integer,
    raw text NOT NULL,
    accepted boolean,
    text text,
    answered_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (judgement_id, kind, index)
);

CREATE TABLE feedback (
    id uuid PRIMARY KEY,
    turn_id uuid NOT NULL REFERENCES turns,
    api_key_id uuid NOT NULL REFERENCES api_keys,
    score double precision,
    text text,
    effect text NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    announced_at timestamptz,
    applied_at timestamptz,
    CONSTRAINT feedback_says_something_check CHECK (score IS NOT NULL OR text IS NOT NULL),
    CONSTRAINT feedback_score_check CHECK (score BETWEEN -1 AND 1)
);
CREATE INDEX feedback_turn_id_idx ON feedback (turn_id);
CREATE INDEX feedback_unapplied_idx ON feedback (id) WHERE applied_at IS NULL;

CREATE TABLE feedback_requests (
    api_key_id uuid REFERENCES api_keys,
    key_sha256 bytea,
    body_sha256 bytea NOT NULL,
    feedback_id uuid,
    effect text NOT NULL,
    received_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (api_key_id, key_sha256)
);
CREATE INDEX feedback_requests_received_at_idx ON feedback_requests (received_at);

CREATE TABLE judge_trials (
    digest bytea PRIMARY KEY,
    judge text NOT NULL,
    found json NOT NULL,
    tried_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE comparisons (
    turn_id uuid REFERENCES turns,
    signal_hash text,
    judge text,
    before integer NOT NULL,
    after integer,
    why text NOT NULL,
    compared_at timestamptz NOT NULL DEFAULT now(),
    applied_at timestamptz,
    PRIMARY KEY (turn_id, signal_hash, judge),
    CONSTRAINT comparisons_verdicts_check CHECK (before BETWEEN -1 AND 1 AND after BETWEEN -1 AND 1)
);
"""

_TRAINING = """
CREATE TABLE samples (
    id uuid PRIMARY KEY,
    judgement_id uuid NOT NULL UNIQUE REFERENCES judgements,
    turn_id uuid NOT NULL REFERENCES turns,
    policy text NOT NULL REFERENCES policies,
    state text NOT NULL,
    reason text NOT NULL,
    reward double precision,
    hinted_prompts bytea,
    rollout_group_id uuid REFERENCES rollout_groups,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT samples_state_check CHECK (state IN (
        'fresh', 'claimed', 'trained', 'expired', 'quarantined', 'superseded', 'held_out'
    )),
    CONSTRAINT samples_has_gradient_check CHECK (coalesce(reward, 0) <> 0 OR hinted_prompts IS NOT NULL),
    CONSTRAINT samples_ids_are_whole_check CHECK (octet_length(hinted_prompts) % 4 IN (0, 2))
);
CREATE INDEX samples_group_idx ON samples (policy, rollout_group_id, state) WHERE rollout_group_id IS NOT NULL;
CREATE INDEX samples_policy_state_id_idx ON samples (policy, state, id);
CREATE INDEX samples_turn_id_idx ON samples (turn_id);

CREATE TABLE steps (
    policy text REFERENCES policies,
    n integer,
    parent integer NOT NULL,
    epoch integer NOT NULL,
    state text NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    attempt_at timestamptz,
    progress text,
    tokens_a_second double precision,
    seconds_left double precision,
    failed integer NOT NULL DEFAULT 0,
    interrupted integer NOT NULL DEFAULT 0,
    recipe_hash text NOT NULL REFERENCES recipes,
    lr_scale double precision NOT NULL DEFAULT 1,
    reason text,
    metrics json,
    claimed_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    PRIMARY KEY (policy, n),
    FOREIGN KEY (policy, parent) REFERENCES versions,
    CONSTRAINT steps_state_check CHECK (state IN (
        'claimed', 'candidate', 'committed', 'abandoned', 'quarantined', 'rejected'
    )),
    CONSTRAINT steps_finished_check CHECK ((finished_at IS NULL) = (state IN ('claimed', 'candidate'))),
    CONSTRAINT steps_lr_scale_check CHECK (lr_scale > 0 AND lr_scale <= 1)
);
CREATE UNIQUE INDEX steps_open_idx ON steps (policy) WHERE state IN ('claimed', 'candidate');

CREATE TABLE step_samples (
    policy text,
    step integer,
    sample_id uuid REFERENCES samples,
    place integer NOT NULL,
    dropped text,
    without_hint text,
    taught json,
    advantages bytea,
    moves bytea,
    PRIMARY KEY (policy, step, sample_id),
    UNIQUE (policy, step, place),
    FOREIGN KEY (policy, step) REFERENCES steps
);
CREATE INDEX step_samples_sample_id_idx ON step_samples (sample_id);

CREATE TABLE gate_checks (
    policy text,
    version integer,
    name text,
    result text NOT NULL,
    reason text NOT NULL,
    figures json NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (policy, version, name),
    FOREIGN KEY (policy, version) REFERENCES versions,
    CONSTRAINT gate_checks_result_check CHECK (result IN ('passed', 'not_enough', 'failed'))
);

CREATE TABLE probes (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    content json NOT NULL,
    general boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX probes_policy_id_idx ON probes (policy, id);

CREATE TABLE events (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    kind text NOT NULL,
    detail json NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX events_policy_id_idx ON events (policy, id);
"""

_LESSONS = """
CREATE TABLE lessons (
    id uuid PRIMARY KEY,
    policy text NOT NULL REFERENCES policies,
    text text NOT NULL,
    digest bytea,
    state text NOT NULL,
    why text NOT NULL,
    source text NOT NULL,
    turn_id uuid REFERENCES turns,
    shown_by uuid REFERENCES turns,
    superseded_by uuid REFERENCES lessons,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    since_version integer NOT NULL DEFAULT 0,
    UNIQUE (policy, digest),
    CONSTRAINT lessons_state_check CHECK (state IN ('active', 'learned', 'off', 'superseded', 'erased')),
    CONSTRAINT lessons_source_check CHECK (source IN ('typed', 'hint', 'message')),
    CONSTRAINT lessons_text_check CHECK (
        (state = 'erased') = (text = '') AND (state = 'erased') = (digest IS NULL)
    ),
    CONSTRAINT lessons_source_turn_check CHECK ((source = 'typed') = (turn_id IS NULL))
);
CREATE INDEX lessons_policy_id_idx ON lessons (policy, id);
CREATE INDEX lessons_turn_id_idx ON lessons (turn_id);
CREATE INDEX lessons_shown_by_idx ON lessons (shown_by);

CREATE TABLE practice (
    source_turn_id uuid REFERENCES turns,
    lessons uuid[],
    turn_id uuid UNIQUE REFERENCES turns,
    why text NOT NULL,
    practised_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_turn_id, lessons)
);
CREATE INDEX practice_lessons_idx ON practice USING gin (lessons);

CREATE TABLE yardstick (
    lesson_id uuid REFERENCES lessons,
    source_turn_id uuid REFERENCES turns,
    turn_id uuid UNIQUE REFERENCES turns,
    why text NOT NULL,
    prompts bytea,
    first_version integer,
    with_lesson double precision,
    without json NOT NULL,
    PRIMARY KEY (lesson_id, source_turn_id),
    CONSTRAINT yardstick_first_check CHECK ((first_version IS NULL) = (with_lesson IS NULL)),
    CONSTRAINT yardstick_prompts_check CHECK (turn_id IS NOT NULL OR prompts IS NULL),
    CONSTRAINT yardstick_ids_are_whole_check CHECK (octet_length(prompts) % 4 IN (0, 2))
);
CREATE INDEX yardstick_source_turn_id_idx ON yardstick (source_turn_id);
"""

# `clawloop encryption rotate --decrypt` sets the variable, for its own transactions.
_ENCRYPTION = """
CREATE TABLE encryption (
    only_row boolean DEFAULT true PRIMARY KEY,
    check_value bytea NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT encryption_only_row_check CHECK (only_row)
);

CREATE FUNCTION refuse_plain_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('clawloop.decrypting', true) IS DISTINCT FROM 'on' AND EXISTS (SELECT FROM encryption) THEN
        RAISE EXCEPTION 'this database is encrypted: set CLAWLOOP_ENCRYPTION_KEY_FILE'
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    RETURN NEW;
END $$;
"""

# Triggers rather than constraints: while a database is being encrypted, rows that are still plain may be updated.
_PLAIN_TEXT = r"""(NEW.{0} NOT IN ('', 'erased')
    AND (NOT starts_with(NEW.{0}, E'\x1asealed:') OR starts_with(NEW.{0}, E'\x1asealed::')))"""
_PLAIN_JSON = "(NEW.{0}::text NOT IN ('[]', '{{}}') AND json_typeof(NEW.{0}) <> 'string')"
_PLAIN_BYTES = "(octet_length(NEW.{0}) > 0 AND octet_length(NEW.{0}) % 4 <> 2)"
_PLAIN_DIGEST = "(octet_length(NEW.{0}) NOT IN (0, 33))"
_SEALED = {
    "turns": {
        "error": _PLAIN_TEXT,
        "messages_added": _PLAIN_JSON,
        "response": _PLAIN_JSON,
        "sampling": _PLAIN_JSON,
        "prompt_ids": _PLAIN_BYTES,
        "response_ids": _PLAIN_BYTES,
        "logprobs": _PLAIN_BYTES,
        "response_digest": _PLAIN_DIGEST,
        "reply_digest": _PLAIN_DIGEST,
        "asked_digest": _PLAIN_DIGEST,
    },
    "session_prefixes": {"prefix_hash": _PLAIN_DIGEST},
    "tool_lists": {"tools": _PLAIN_JSON, "sha256": _PLAIN_DIGEST},
    "files": {"content": _PLAIN_BYTES, "digest": _PLAIN_DIGEST},
    "judgements": {"hint": _PLAIN_TEXT, "evidence_hash": _PLAIN_DIGEST},
    "votes": {"raw": _PLAIN_TEXT},
    "hints": {"raw": _PLAIN_TEXT, "text": _PLAIN_TEXT},
    "feedback": {"text": _PLAIN_TEXT},
    "samples": {"hinted_prompts": _PLAIN_BYTES},
    "step_samples": {"advantages": _PLAIN_BYTES, "moves": _PLAIN_BYTES},
    "probes": {"content": _PLAIN_JSON},
    "lessons": {"text": _PLAIN_TEXT, "digest": _PLAIN_DIGEST},
    "yardstick": {"prompts": _PLAIN_BYTES},
}


def _statements() -> Iterator[str]:
    yield from (_SERVING, _EPISODES, _TURNS, _JUDGING, _TRAINING, _LESSONS, _ENCRYPTION)
    for table, columns in _SEALED.items():
        plain = {column: form.format(column) for column, form in columns.items()}
        # One for what is inserted: the function is called once a row where nothing is encrypted.
        yield _refusing(table, "insert", "INSERT", " OR ".join(plain.values()))
        for column, is_plain in plain.items():  # the row's other columns may be plain yet
            yield _refusing(table, column, f"UPDATE OF {column}", is_plain)


def _refusing(table: str, name: str, event: str, plain: str) -> str:
    return f"""
        CREATE TRIGGER refuse_plain_{name} BEFORE {event} ON {table} FOR EACH ROW WHEN ({plain})
        EXECUTE FUNCTION refuse_plain_content()
    """


# Until the first release this file changes in place. What it makes is part of the revision, so that a database which
# an earlier state of the file made is refused. Release 0.1.0 writes the revision out, and the file stays as it is.
revision = f"0001_{crc32(''.join(_statements()).encode()):08x}"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    from alembic import op  # here: every process reads the revision, see db/schema.py

    for statement in _statements():
        op.execute(statement)


def downgrade() -> None:
    from alembic import op

    op.execute("""
        DROP TABLE encryption, yardstick, practice, lessons, comparisons, feedback_requests, feedback, hints, votes,
            events, probes, gate_checks, judge_trials, step_samples, steps, samples, judgements, turn_files, files,
            session_prefixes, turns, tool_lists, sessions, stored_bytes, api_keys, signing_keys, curriculum_kinds,
            episodes, rollout_groups, rollouts, temporal_server, engine_versions, engines, versions, policies,
            recipes;
        DROP FUNCTION refuse_plain_content;
    """)
