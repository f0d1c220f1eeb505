//! Where everything lies in etcd. One cluster of Omni is one prefix, so that several share an etcd
//! and a role of etcd's can be bound to one.
//!
//! ```text
//! /omni/<cluster>/members/<id>   the record, without load; bound to the member's lease
//! /omni/<cluster>/loads/<id>     the load; bound to the same lease
//! /omni/<cluster>/drains/<id>    exists: an operator asked for a drain; bound to the same lease
//! /omni/<cluster>/cordons/<id>   exists: an operator keeps new work from it; bound to the same lease
//! /omni/<cluster>/plans/<pool>   the plan; bound to no lease
//! /omni/<cluster>/epoch          written with every change of the above but load
//! ```
//!
//! Values are messages of `registry.proto`. An epoch is a revision of etcd: that of the last write
//! that touched anything but load.

/// What a key is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    Member(&'a str),
    Load(&'a str),
    Drain(&'a str),
    Cordon(&'a str),
    Plan(&'a str),
    Epoch,
}

/// The keys of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    /// `cluster` is a checked name: it has no slash.
    pub(crate) fn new(cluster: &str) -> Self {
        Self {
            prefix: format!("/omni/{cluster}/"),
        }
    }

    /// What every key of the cluster starts with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn members(&self) -> String {
        format!("{}members/", self.prefix)
    }

    pub(crate) fn member(&self, id: &str) -> String {
        format!("{}members/{id}", self.prefix)
    }

    pub(crate) fn load(&self, id: &str) -> String {
        format!("{}loads/{id}", self.prefix)
    }

    pub(crate) fn drain(&self, id: &str) -> String {
        format!("{}drains/{id}", self.prefix)
    }

    pub(crate) fn cordon(&self, id: &str) -> String {
        format!("{}cordons/{id}", self.prefix)
    }

    pub(crate) fn plans(&self) -> String {
        format!("{}plans/", self.prefix)
    }

    pub(crate) fn plan(&self, pool: &str) -> String {
        format!("{}plans/{pool}", self.prefix)
    }

    pub(crate) fn epoch(&self) -> String {
        format!("{}epoch", self.prefix)
    }

    /// Reads a key; `None` for one that this version does not know.
    pub(crate) fn parse<'a>(&self, key: &'a [u8]) -> Option<Kind<'a>> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?;
        match rest.split_once('/') {
            None if rest == "epoch" => Some(Kind::Epoch),
            Some(("members", id)) => Some(Kind::Member(id)),
            Some(("loads", id)) => Some(Kind::Load(id)),
            Some(("drains", id)) => Some(Kind::Drain(id)),
            Some(("cordons", id)) => Some(Kind::Cordon(id)),
            Some(("plans", pool)) => Some(Kind::Plan(pool)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_reads_back_and_other_clusters_are_not_ours() {
        let keys = Keys::new("blue");
        let pairs = [
            (keys.member("a"), Kind::Member("a")),
            (keys.load("a"), Kind::Load("a")),
            (keys.drain("a"), Kind::Drain("a")),
            (keys.cordon("a"), Kind::Cordon("a")),
            (keys.plan("x/y"), Kind::Plan("x/y")),
            (keys.epoch(), Kind::Epoch),
        ];
        for (key, kind) in pairs {
            assert!(key.starts_with(keys.prefix()));
            assert_eq!(keys.parse(key.as_bytes()), Some(kind));
            assert_eq!(Keys::new("blu").parse(key.as_bytes()), None);
        }
        assert_eq!(keys.parse(b"/omni/blue/news/a"), None);
        assert_eq!(keys.parse(b"\xff"), None);
    }
}
