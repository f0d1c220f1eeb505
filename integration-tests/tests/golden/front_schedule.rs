//! Golden 03: sigmas and timesteps.

use model::Schedule;

use crate::common::{in_set, json};

#[test]
fn schedules_equal_the_reference_to_the_last_bit() {
    if !in_set(&["03_scheduler.json"]) {
        return;
    }
    let golden = json("03_scheduler.json");
    for (name, case) in golden.as_object().unwrap() {
        let (shift, steps) = name
            .strip_prefix("shift")
            .and_then(|rest| rest.split_once("_steps"))
            .unwrap_or_else(|| panic!("{name}"));
        let schedule = Schedule::new(steps.parse().unwrap(), shift.parse().unwrap()).unwrap();
        for (what, got) in [
            ("timesteps", &schedule.timesteps),
            ("sigmas", &schedule.sigmas),
        ] {
            let want: Vec<f32> = case[what]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_f64().unwrap() as f32)
                .collect();
            assert_eq!(got, &want, "{what} of {name}");
        }
    }
}
