"""What solvers are made of: the incumbent, bounds, the step-cut programme, local searches, the cache. Without torch.

Notation, with the symbols of Checkmate (Jain et al., MLSys 2020) and rotor (Beaumont et al., 2019):

- *Operations* ``v_1 .. v_n`` come in *base order*: forward, loss, backward. Operation ``v_i`` takes ``C_i`` seconds
  (``cost.seconds``) and, while it runs, a workspace beside its inputs and outputs.
- *Values* are storages. Each is made by one operation, its *maker*, and read by later ones; value ``u`` takes ``M_u``
  bytes. A *retained* value (a gradient, an output) stays until the step ends.
- A *schedule* is an order of runs in which each operation runs at least once. Runs after the first are
  *recomputations*, all of them together the *recompute set*.
- A *moment* is one run of a schedule. A value is *live* at it if a copy was made before and is read at it or later; the
  *live bytes* are the sum of those and the workspace. The *peak* is the most live bytes of any moment, the
  *budget* what the peak may be, the *overhead* the seconds that a plan adds to the step: recompute, and waiting for
  transfers of *offloaded* values, which wait in the host's memory.
- A *cut* is a moment at which a programme asks what is live: the first run of an operation ``v_t``. Checkmate has one
  at every operation, its stages ``t = 1 .. n``; here only a few are written down.
- Columns of the programme, each 0 or 1: ``held[k][u]`` (Checkmate's ``S_{t,u}``) says that value ``u`` is live at cut
  ``k``, ``run_again[k][i]`` (``R_{t,i}``) that operation ``i`` is recomputed between cuts ``k`` and ``k + 1``. The
  objective is the sum of ``C_i R_{t,i}``, the budget row of a cut bounds the sum of ``M_u S_{t,u}``, and what is read
  must be held or recomputed: ``R_{t,i} <= R_{t,j} + S_{t,u}`` where ``i`` reads value ``u`` of maker ``j``.
- A *relaxation* lets columns be shares between 0 and 1. Its optimum is a *bound*: no plan adds less. The *incumbent* is
  the best plan so far, the *gap* what lies between both.
- rotor's chain has stages instead: one may be *saved* whole (its ``F_all``), *passed* with only its input kept
  (``F_ck``), or passed with nothing kept (``F_none``).
"""
