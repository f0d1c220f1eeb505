//! The cluster that the fake router shows: two workers, one of them cordoned, a stage, and three requests.
use proto::v1::{
    Accepted, Candidate, ClusterEvent, Load, Member, MemberState, Mode, ModelInfo, PassedOver,
    Placement, Plan, Priority, RequestRecord, Role, Span, Timings, get_response::State,
};

/// 2026-11-30T16:45:00Z.
const NOON_MS: u64 = 1_796_057_100_000;

fn load(running: u32, queued: u32, capacity: u32) -> Load {
    Load {
        running,
        queued,
        capacity,
        ..Load::default()
    }
}

fn stage(id: &str, role: Role, load: Load) -> Member {
    Member {
        id: id.to_owned(),
        role: role.into(),
        pool: "default".to_owned(),
        state: MemberState::Ready.into(),
        endpoint: format!("http://10.0.0.1:{}", 7600 + role as i32),
        model: Some(ModelInfo {
            name: "demo".to_owned(),
            weights_id: "0123456789abcdef0123456789abcdef".to_owned(),
            ..ModelInfo::default()
        }),
        epoch: 2,
        load: Some(load),
        ..Member::default()
    }
}

pub(crate) fn members() -> Vec<Member> {
    let cordoned = Member {
        cordoned: true,
        ..stage("m2", Role::DitWorker, load(0, 0, 4))
    };
    vec![
        cordoned,
        stage("m1", Role::DitWorker, load(2, 1, 4)),
        stage("a1", Role::ArStage, load(0, 0, 16)),
    ]
}

pub(crate) fn plan() -> Plan {
    Plan {
        pool: "default".to_owned(),
        generation: 2,
        body: b"cfg=2,tp=2".to_vec(),
        epoch: 3,
    }
}

fn accepted(id: &str) -> Accepted {
    Accepted {
        request_id: id.to_owned(),
        model: "demo".to_owned(),
        width: 256,
        height: 192,
        seed: 7,
        steps: 8,
        guidance: 5.0,
        cost: 12_288,
        n: 1,
        template: "pretrain".to_owned(),
        mode: Mode::Image.into(),
        ..Accepted::default()
    }
}

fn record(id: &str, state: State, step: u32, age_ms: f64) -> RequestRecord {
    RequestRecord {
        request_id: id.to_owned(),
        state: state.into(),
        accepted: Some(accepted(id)),
        step,
        accepted_unix_ms: NOON_MS,
        age_ms,
        priority: Priority::Standard.into(),
        prompt_chars: 16,
        ..RequestRecord::default()
    }
}

fn placements() -> Vec<Placement> {
    let candidate = |member: &str, load, under_way| Candidate {
        member: member.to_owned(),
        load: Some(load),
        under_way,
    };
    let prefill = Placement {
        stage: "ar-stage".to_owned(),
        member: "a1".to_owned(),
        epoch: 3,
        at_ms: 2.5,
        eligible: 1,
        candidates: vec![candidate("a1", load(0, 0, 16), 0)],
        attempt: 1,
        outcome: "done".to_owned(),
        ..Placement::default()
    };
    let lost = Placement {
        stage: "dit-worker".to_owned(),
        member: "m0".to_owned(),
        at_ms: 42.0,
        eligible: 2,
        candidates: vec![
            candidate("m0", load(0, 0, 4), 0),
            candidate("m1", load(2, 1, 4), 1),
        ],
        passed_over: vec![PassedOver {
            reason: "cordoned".to_owned(),
            members: 1,
        }],
        outcome: "lost: dit-worker m0 went away: connection reset".to_owned(),
        ..prefill.clone()
    };
    let again = Placement {
        member: "m1".to_owned(),
        at_ms: 600.0,
        eligible: 1,
        candidates: vec![candidate("m1", load(2, 1, 4), 1)],
        attempt: 2,
        from_step: 4,
        outcome: "done".to_owned(),
        ..lost.clone()
    };
    vec![prefill, lost, again]
}

fn spans() -> Vec<Span> {
    let span = |id, parent, name: &str, (start_ms, duration_ms), member: &str, detail: &str| Span {
        id,
        parent,
        name: name.to_owned(),
        start_ms,
        duration_ms,
        member: member.to_owned(),
        detail: detail.to_owned(),
    };
    vec![
        span(1, 0, "queue", (0.0, 2.0), "", ""),
        span(
            2,
            0,
            "prefill",
            (2.5, 39.0),
            "a1",
            "9 tokens of prompt, 0 written",
        ),
        span(3, 2, "compute", (3.0, 35.0), "a1", ""),
        span(4, 2, "publish", (38.0, 3.0), "a1", ""),
        span(
            5,
            0,
            "image 0",
            (42.0, 550.0),
            "m0",
            "lost: connection reset",
        ),
        span(6, 0, "image 0", (600.0, 600.0), "m1", ""),
        span(7, 6, "wait", (600.0, 5.0), "m1", ""),
        span(8, 6, "transfer", (605.0, 4.0), "m1", "4096 bytes over shm"),
        span(9, 6, "steps", (609.0, 500.0), "m1", ""),
        span(10, 6, "decode", (1150.0, 50.0), "m1", ""),
    ]
}

pub(crate) fn records() -> Vec<RequestRecord> {
    let done = RequestRecord {
        placements: placements(),
        spans: spans(),
        timings: Some(Timings {
            queue_ms: 2.0,
            prefill_ms: 35.0,
            transfer_ms: 7.0,
            denoise_ms: 500.0,
            decode_ms: 50.0,
            total_ms: 1200.0,
            transport: "shm".to_owned(),
            transfer_bytes: 4096,
        }),
        prefixes: vec!["ab".repeat(32), "cd".repeat(32)],
        prefix_tokens: 9,
        image_tokens: 192,
        ..record("r1", State::Done, 8, 1200.0)
    };
    let failed = RequestRecord {
        error: "no dit-worker is ready".to_owned(),
        code: 14,
        ..record("r0", State::Failed, 0, 3.0)
    };
    vec![record("r2", State::Denoise, 3, 75_000.0), done, failed]
}

pub(crate) fn events() -> Vec<ClusterEvent> {
    let event = |number, warning, reason: &str, object: &str, message: &str| ClusterEvent {
        number,
        unix_ms: NOON_MS + number * 1_000,
        warning,
        reason: reason.to_owned(),
        object: object.to_owned(),
        message: message.to_owned(),
        count: 1,
    };
    let refused = ClusterEvent {
        count: 7,
        ..event(
            4,
            true,
            "RequestRefused",
            "code/RESOURCE_EXHAUSTED",
            "256 requests are waiting already",
        )
    };
    vec![
        event(
            1,
            false,
            "MemberJoined",
            "member/m1",
            "dit-worker of pool default, ready",
        ),
        event(
            2,
            true,
            "StageLost",
            "member/m0",
            "dit-worker, request r1: connection reset",
        ),
        refused,
        event(
            5,
            false,
            "MemberCordoned",
            "member/m2",
            "dit-worker of pool default takes no new work",
        ),
    ]
}
