//! What others write into etcd, and that the fold over changes is the table it folds to.
use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message as _;

use super::{config, open, server::EtcdServer};
use crate::{
    Etcd, EtcdConfig, Event, Load, Member, MemberState, Picture, Plan, Registry as _, Snapshot,
    conformance::{TTL, beat, member, next, picture},
    etcd::{
        keys::Keys,
        table::{Change, Table},
    },
};

#[tokio::test]
async fn records_that_break_the_contract_are_not_members() {
    let server = EtcdServer::start();
    let etcd = open(&server);
    let mut watch = etcd.watch().await.unwrap();
    next(&mut watch).await;
    let mut raw = etcd_client::Client::connect([server.endpoint()], None)
        .await
        .unwrap();
    let nowhere = Member {
        endpoint: "nowhere".to_owned(),
        ..member("nowhere")
    };
    let values = [
        ("members/noise", b"\xff\xff\xff".to_vec()),
        ("members/other", member("another").encode_to_vec()),
        ("members/nowhere", nowhere.encode_to_vec()),
        ("members/large", vec![0; 300_000]),
        ("loads/a", b"\xff\xff".to_vec()),
        ("plans/p", b"\xff\xff".to_vec()),
        ("unknown/a", b"x".to_vec()),
    ];
    for (key, value) in values {
        let key = format!("/omni/default/{key}");
        raw.put(key, value, None).await.unwrap();
    }
    // The first thing a watcher sees is the one good record after them.
    let grant = etcd.register(member("a"), TTL).await.unwrap();
    let update = next(&mut watch).await;
    assert_eq!(update.epoch, grant.epoch);
    assert!(matches!(update.event, Event::Put(member) if member.id == "a"));
    let now = picture(&*etcd).await;
    assert_eq!(now.members.keys().collect::<Vec<_>>(), ["a"]);
    assert!(now.plans.is_empty());
    // A plan that cannot be read is replaced, not obeyed.
    let first = Plan {
        pool: "p".to_owned(),
        generation: 1,
        ..Plan::default()
    };
    etcd.publish_plan(first).await.unwrap();
}

#[tokio::test]
async fn clusters_of_one_etcd_do_not_see_each_other() {
    let server = EtcdServer::start();
    let named = |name: &str| {
        let cluster = name.to_owned();
        Etcd::new(EtcdConfig {
            cluster,
            ..config(&server)
        })
        .unwrap()
    };
    let (blue, blues) = (named("blue"), named("blues"));
    blue.register(member("a"), TTL).await.unwrap();
    blues.register(member("a"), TTL).await.unwrap();
    blues.drain("a").await.unwrap();
    assert_eq!(
        picture(&blue).await.members["a"].state(),
        MemberState::Starting
    );
    assert_eq!(
        picture(&blues).await.members["a"].state(),
        MemberState::Draining
    );
}

#[tokio::test]
async fn a_picture_of_many_pages_is_whole() {
    let server = EtcdServer::start();
    let etcd = open(&server);
    let mut raw = etcd_client::Client::connect([server.endpoint()], None)
        .await
        .unwrap();
    let ids: Vec<_> = (0..600).map(|index| format!("m{index:04}")).collect();
    for chunk in ids.chunks(100) {
        let put = |id: &String| {
            let key = format!("/omni/default/members/{id}");
            etcd_client::TxnOp::put(key, member(id).encode_to_vec(), None)
        };
        let puts: Vec<_> = chunk.iter().map(put).collect();
        let txn = etcd_client::Txn::new().and_then(puts);
        raw.txn(txn).await.unwrap();
    }
    let now = picture(&*etcd).await;
    assert!(now.members.keys().eq(ids.iter()));
    // Beyond what a registry holds nobody else gets in.
    let grant = etcd.register(member("one-more"), TTL).await.unwrap();
    let late = beat("one-more", grant.lease, MemberState::Ready, 1);
    etcd.keep_alive(late).await.unwrap();
    assert_eq!(picture(&*etcd).await.members.len(), 601);
}

#[derive(Debug, Clone)]
enum Write {
    Member(u8, bool),
    Load(u8, u32),
    Drain(u8),
    Cordon(u8, bool),
    Plan(u8, u64),
    Gone(u8),
}

fn writes() -> impl Strategy<Value = Vec<Vec<Write>>> {
    let write = prop_oneof![
        (0..3_u8, any::<bool>()).prop_map(|(id, ready)| Write::Member(id, ready)),
        (0..3_u8, 0..3_u32).prop_map(|(id, queued)| Write::Load(id, queued)),
        (0..3_u8).prop_map(Write::Drain),
        (0..3_u8, any::<bool>()).prop_map(|(id, set)| Write::Cordon(id, set)),
        (0..2_u8, 1..9_u64).prop_map(|(pool, generation)| Write::Plan(pool, generation)),
        (0..3_u8).prop_map(Write::Gone),
    ];
    // Revisions of one or more writes each.
    proptest::collection::vec(proptest::collection::vec(write, 1..4), 0..40)
}

fn changes(keys: &Keys, write: &Write, revision: u64) -> Vec<Change> {
    let change = |key: String, value: Option<Vec<u8>>| Change {
        key: key.into_bytes(),
        value,
        revision,
    };
    let name = |id: u8| format!("m{id}");
    match *write {
        Write::Member(id, ready) => {
            let mut record = member(&name(id));
            if ready {
                record.set_state(MemberState::Ready);
            }
            vec![change(keys.member(&name(id)), Some(record.encode_to_vec()))]
        }
        Write::Load(id, queued) => {
            let load = Load {
                queued,
                ..Load::default()
            };
            vec![change(keys.load(&name(id)), Some(load.encode_to_vec()))]
        }
        Write::Drain(id) => vec![change(keys.drain(&name(id)), Some(Vec::new()))],
        Write::Cordon(id, set) => {
            let value = set.then(Vec::new);
            vec![change(keys.cordon(&name(id)), value)]
        }
        Write::Plan(pool, generation) => {
            let plan = Plan {
                pool: name(pool),
                generation,
                ..Plan::default()
            };
            vec![change(keys.plan(&name(pool)), Some(plan.encode_to_vec()))]
        }
        Write::Gone(id) => [
            keys.member(&name(id)),
            keys.load(&name(id)),
            keys.drain(&name(id)),
            keys.cordon(&name(id)),
        ]
        .map(|key| change(key, None))
        .to_vec(),
    }
}

proptest! {
    /// Whatever lies under our keys, nothing breaks and nothing but whole records is shown.
    #[test]
    fn any_bytes_are_a_record_or_are_passed_over(
        writes in proptest::collection::vec(
            ("(members|loads|drains|cordons|plans|epoch|x)?/?[a-z/]{0,6}", proptest::collection::vec(any::<u8>(), 0..80)),
            0..20,
        ),
    ) {
        let keys = Keys::new("c");
        let change = |(key, value): (String, Vec<u8>)| Change {
            key: format!("/omni/c/{key}").into_bytes(),
            value: Some(value),
            revision: 3,
        };
        let changes: Vec<_> = writes.into_iter().map(change).collect();
        let mut table = Table::new(keys.clone(), []);
        for update in table.apply(&changes) {
            let shown = match update.event {
                Event::Put(member) => member.id.is_empty() || member.endpoint.is_empty(),
                Event::Plan(plan) => plan.generation == 0,
                other => panic!("{other:?}"),
            };
            prop_assert!(!shown, "half a record was shown");
        }
        let read = Table::new(keys, changes);
        prop_assert_eq!(read.snapshot(), table.snapshot());
    }

    /// However changes are cut into answers, replaying the updates gives the table, the table is the
    /// one that the keys themselves give, and epochs never fall.
    #[test]
    fn watchers_see_exactly_what_the_keys_say(revisions in writes(), cut in 1..7_usize) {
        let keys = Keys::new("c");
        let mut all = Vec::new();
        for (index, group) in revisions.iter().enumerate() {
            let revision = index as u64 + 1;
            all.extend(group.iter().flat_map(|write| changes(&keys, write, revision)));
        }
        let mut table = Table::new(keys.clone(), []);
        let mut seen = Snapshot::default();
        for part in all.chunks(cut) {
            for update in table.apply(part) {
                prop_assert!(update.epoch >= seen.epoch);
                seen.apply(update);
            }
        }
        let mut last = BTreeMap::new();
        for change in &all {
            last.insert(change.key.clone(), change.clone());
        }
        let fresh = Table::new(keys, last.into_values().filter(|change| change.value.is_some()));
        let (Event::Snapshot(folded), Event::Snapshot(read)) =
            (table.snapshot().event, fresh.snapshot().event)
        else {
            panic!("no pictures");
        };
        prop_assert_eq!(&folded, &read);
        let Picture { members, plans } = folded;
        let expected = Snapshot::new(seen.epoch, members).with_plans(plans);
        prop_assert_eq!(seen, expected);
    }
}
