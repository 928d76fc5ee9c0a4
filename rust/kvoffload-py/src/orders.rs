//! What goes between Python's lists and the core's numbers with a step.

use kvoffload_core::jobs::JobId;
use kvoffload_core::requests::{self as core, JobOrder};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::convert::slots_to_bytes;

/// (job, request, blocks, blocks per group, first block per group, slots)
pub(crate) type Order<'py> = (
    u64,
    Bound<'py, PyString>,
    Bound<'py, PyBytes>,
    Vec<u32>,
    Vec<u64>,
    Bound<'py, PyBytes>,
);

/// (loads, stores, jobs to flush, those of them that are spoiled, loads that are void)
pub(crate) type Orders<'py> = (
    Vec<Order<'py>>,
    Vec<Order<'py>>,
    Vec<u64>,
    Vec<u64>,
    Vec<u64>,
);

/// Numbers read from Python lists, group after group.
#[derive(Default)]
pub(crate) struct Lists {
    pub(crate) ids: Vec<u32>,
    ends: Vec<usize>,
}

impl Lists {
    pub(crate) fn clear(&mut self) {
        self.ids.clear();
        self.ends.clear();
    }

    pub(crate) fn end_group(&mut self) {
        self.ends.push(self.ids.len());
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = &[u32]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let group = &self.ids[start..end];
            start = end;
            group
        })
    }
}

/// A step's orders for Python.
pub(crate) fn to_python<'py>(py: Python<'py>, orders: &core::Orders) -> PyResult<Orders<'py>> {
    Ok((
        jobs(py, &orders.loads)?,
        jobs(py, &orders.stores)?,
        job_numbers(&orders.flush),
        job_numbers(&orders.spoiled),
        job_numbers(&orders.void),
    ))
}

fn job_numbers(jobs: &[JobId]) -> Vec<u64> {
    jobs.iter().map(|job| job.0).collect()
}

fn jobs<'py>(py: Python<'py>, orders: &[JobOrder]) -> PyResult<Vec<Order<'py>>> {
    orders
        .iter()
        .map(|order| {
            let blocks = PyBytes::new_with(py, order.blocks.len() * 4, |bytes| {
                for (out, block) in bytes.chunks_exact_mut(4).zip(&order.blocks) {
                    out.copy_from_slice(&block.to_ne_bytes());
                }
                Ok(())
            })?;
            Ok((
                order.id.0,
                PyString::new(py, &order.request),
                blocks,
                order.group_sizes.to_vec(),
                order.first_blocks.to_vec(),
                slots_to_bytes(py, &order.slots)?,
            ))
        })
        .collect()
}
