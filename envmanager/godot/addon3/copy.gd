extends Reference
# One copy of the game: its root, its arena, its agents, and where its episode stands.

var index: int = 0
var root: Node = null
var root_id: int = 0
var arena: Node = null  # null while the game changes its scene
var rng: RandomNumberGenerator = null  # of its arena, and of the next one
var agents: Array = []
var options: Dictionary = {}
var shown: bool = true
var next_k: int = 0
var first_new_k: int = 0  # of the agents that have joined since the arena left
var ended_bits: int = 0  # 1 terminated, 2 truncated: the arena's episode is over when the action is
var ended_agents: Array = []  # those whose own episode is over
var has_after_tick: bool = false
var reset_tick: int = -1  # the tick of the last reset()
var ending: Array = []  # all copies in which something has ended with this action; one list for all
var _is_listed: bool = false


# The first end of an episode counts.
func end_episode(bits: int) -> void:
	if ended_bits == 0:
		ended_bits = bits
		_list()


# The episode of this agent alone is over.
func end_agent(agent: Node) -> void:
	ended_agents.append(agent)
	_list()


func _list() -> void:
	if not _is_listed:
		_is_listed = true
		ending.append(self)


# The agents whose episode is over; when the arena's is, all.
func enders() -> Array:
	if ended_bits == 0:
		return ended_agents
	for agent in agents:
		if agent._bits == 0:
			agent._bits = ended_bits
	return agents


# Begins the next episode of those whose episode is over.
func begin_next() -> void:
	_is_listed = false
	var restarting = ended_agents
	ended_agents = []
	if ended_bits != 0:
		ended_bits = 0
		_reset()
	else:
		for agent in restarting:
			agent.restart()


# Begins an episode, whatever was before.
func begin() -> void:
	ended_bits = 0
	ended_agents = []
	for agent in agents:
		agent._bits = 0
		agent._final = null
		agent.reward = 0.0
	_reset()
	for agent in agents:
		agent.reward = 0.0


func _reset() -> void:
	reset_tick = Engine.get_physics_frames()
	arena.reset(arena.rng, options)
