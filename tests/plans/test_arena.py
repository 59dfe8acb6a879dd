"""A plan that was asked for an arena says what it takes."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.arena import arena_of, blocks_of
from planner.plans.plan import Plan
from planner.plans.planning import plan_from_solution
from planner.ir.problem import Solution
from planner.solving.arena import lay_out
from tests.oracle import random_graph
