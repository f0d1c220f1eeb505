//! A plan as one line of text: `cfg=2,tp=4,ep=ulysses+tp`.

use std::fmt;
use std::str::FromStr;

use super::{Plan, RingPrefix, SharedExpert};
use crate::{Axis, AxisSet, ParallelError};

/// Name of the plan of one rank.
const SINGLE: &str = "single";

impl fmt::Display for Plan {
    /// Only what differs from one rank is written, so that equal plans have equal texts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = Axis::ALL
            .into_iter()
            .zip(self.sizes())
            .filter(|(_, size)| *size != 1)
            .map(|(axis, size)| format!("{axis}={size}"))
            .collect();
        if !self.ep.is_empty() {
            let names: Vec<&str> = self.ep.axes().map(Axis::name).collect();
            parts.push(format!("ep={}", names.join("+")));
        }
        if self.shared_expert == SharedExpert::Replicated {
            parts.push("shared_expert=replicated".to_owned());
        }
        if self.ring_prefix == RingPrefix::Sharded {
            parts.push("ring_prefix=sharded".to_owned());
        }
        if parts.is_empty() {
            parts.push(SINGLE.to_owned());
        }
        f.write_str(&parts.join(","))
    }
}

impl FromStr for Plan {
    type Err = ParallelError;

    /// Reads `single`, or a list of `axis=size`, `ep=axis+axis`, `shared_expert=split|replicated` and
    /// `ring_prefix=replicated|sharded`, each at most once, in any order.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let mut plan = Self::default();
        if text == SINGLE {
            return Ok(plan);
        }
        let mut seen: Vec<&str> = Vec::new();
        for entry in text.split(',') {
            let refused = |problem: String| ParallelError::PlanText {
                entry: entry.to_owned(),
                problem,
            };
            let (name, value) = entry
                .split_once('=')
                .ok_or_else(|| refused("is not NAME=VALUE".into()))?;
            if seen.contains(&name) {
                return Err(refused("comes twice".into()));
            }
            seen.push(name);
            let axis = |name: &str| Axis::ALL.into_iter().find(|axis| axis.name() == name);
            match (name, value) {
                ("ep", axes) => {
                    for part in axes.split('+') {
                        let axis =
                            axis(part).ok_or_else(|| refused(format!("{part:?} is no axis")))?;
                        plan.ep = plan.ep.with(axis);
                    }
                }
                ("shared_expert", "split") => plan.shared_expert = SharedExpert::Split,
                ("shared_expert", "replicated") => plan.shared_expert = SharedExpert::Replicated,
                ("shared_expert", _) => {
                    return Err(refused("must be split or replicated".into()));
                }
                ("ring_prefix", "replicated") => plan.ring_prefix = RingPrefix::Replicated,
                ("ring_prefix", "sharded") => plan.ring_prefix = RingPrefix::Sharded,
                ("ring_prefix", _) => {
                    return Err(refused("must be replicated or sharded".into()));
                }
                _ => {
                    let axis = axis(name).ok_or_else(|| {
                        refused(
                            "must be pp, cfg, ring, ulysses, tp, ep, shared_expert or ring_prefix"
                                .into(),
                        )
                    })?;
                    let size = value
                        .parse()
                        .map_err(|_| refused("must be a whole number".into()))?;
                    plan = plan.with_size(axis, size);
                }
            }
        }
        let mesh = plan.mesh()?;
        // An axis of one rank spreads nothing; equal plans stay equal.
        plan.ep = mesh.used(plan.ep);
        if plan.ep.contains(Axis::Pp) {
            return Err(ParallelError::PlanText {
                entry: format!("ep={}", AxisSet::from(Axis::Pp)),
                problem: "experts are never spread over pipeline stages".into(),
            });
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refusal(text: &str) -> String {
        text.parse::<Plan>().unwrap_err().to_string()
    }

    proptest! {
        #[test]
        fn a_plan_survives_its_text(
            sizes in prop::array::uniform5(1_usize..5), bits in 0_usize..16,
            replicated: bool, sharded: bool,
        ) {
            let mut plan = Plan::default();
            for (axis, size) in Axis::ALL.into_iter().zip(sizes) {
                plan = plan.with_size(axis, size);
            }
            let mesh = plan.mesh().unwrap();
            plan.ep = mesh.used(AxisSet::EXPERTS.subsets().nth(bits).unwrap());
            if replicated {
                plan.shared_expert = SharedExpert::Replicated;
            }
            if sharded {
                plan.ring_prefix = RingPrefix::Sharded;
            }
            prop_assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
        }

        #[test]
        fn no_text_panics(text in "[a-z0-9=,+_]{0,30}") {
            let _ = text.parse::<Plan>();
        }
    }

    #[test]
    fn the_texts_of_the_documents_parse() {
        assert_eq!("single".parse::<Plan>().unwrap(), Plan::default());
        let plan: Plan = "tp=4,cfg=2,ep=cfg+tp".parse().unwrap();
        assert_eq!((plan.cfg, plan.tp), (2, 4));
        assert_eq!(plan.to_string(), "cfg=2,tp=4,ep=cfg+tp");
        assert_eq!("tp=1,ep=tp".parse::<Plan>().unwrap(), Plan::default());
    }

    #[test]
    fn what_is_no_plan_is_refused_by_its_entry() {
        assert_eq!(refusal(""), "plan entry \"\" is not NAME=VALUE");
        assert_eq!(refusal("tp=2,tp=2"), "plan entry \"tp=2\" comes twice");
        assert_eq!(
            refusal("tp=x"),
            "plan entry \"tp=x\" must be a whole number"
        );
        assert!(refusal("dp=2").starts_with("plan entry \"dp=2\" must be pp, cfg,"));
        assert!(refusal("ep=tp+dp").ends_with("\"dp\" is no axis"));
        assert!(refusal("pp=2,ep=pp").contains("never spread over pipeline stages"));
        assert_eq!(
            refusal("tp=0"),
            "plan axis tp must be between 1 and 1024, got 0"
        );
        assert!(refusal("shared_expert=none").ends_with("must be split or replicated"));
    }
}
