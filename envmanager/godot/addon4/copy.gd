extends RefCounted
## One copy of the game: its root, its arena, its agents, and where its episode stands.

var index := 0
var root: Node = null
var root_id := 0
var arena: Node = null  # null while the game changes its scene
var rng: RandomNumberGenerator = null  # of its arena, and of the next one
var agents: Array = []
var options := {}
var shown := true
var next_k := 0
var first_new_k := 0  # of the agents that have joined since the arena left
var ended_bits := 0  # 1 terminated, 2 truncated: the arena's episode is over when the action is
var ended_agents: Array = []  # those whose own episode is over
var on_demand := false  # the trainer begins each episode
var rests := false  # its episode is over, and the trainer has not begun the next one
var next = null  # what the trainer begins with the action: [arena, at once, seed, options]
var has_after_tick := false
var reset_tick := -1  # the tick of the last reset()
var ending: Array = []  # all copies in which something has ended with this action; one list for all
var _is_listed := false


## The first end of an episode counts.
func end_episode(bits: int) -> void:
	if ended_bits == 0:
		ended_bits = bits
		_list()


## The episode of this agent alone is over.
func end_agent(agent: Node) -> void:
	ended_agents.append(agent)
	_list()


func _list() -> void:
	if not _is_listed:
		_is_listed = true
		ending.append(self)


## The agents whose episode is over; when the arena's is, all.
func enders() -> Array:
	if ended_bits == 0:
		return ended_agents
	for agent in agents:
		if agent._bits == 0:
			agent._bits = ended_bits
	return agents


## Begins the next episode of those whose episode is over.
func begin_next() -> void:
	_is_listed = false
	var restarting := ended_agents
	ended_agents = []
	if on_demand and (ended_bits != 0 or _all_have_ended()):
		rest()
	elif ended_bits != 0:
		ended_bits = 0
		_reset()
	else:
		for agent in restarting:
			agent.restart()


# An arena in which no agent goes on has ended, too.
func _all_have_ended() -> bool:
	for agent in agents:
		if agent._bits == 0:
			return false
	return true


## Forgets how the last episode ended, and what it earned.
func clear() -> void:
	ended_bits = 0
	ended_agents = []
	for agent in agents:
		agent._bits = 0
		agent._final = null
		agent.reward = 0.0


## Lets nothing count until the next episode begins.
func rest() -> void:
	rests = true
	ended_bits = 2


## Begins the episode that the trainer wants. What leaves meanwhile was of the last one.
func begin_next_task() -> void:
	if next[2] != null:
		arena.rng.seed = int(next[2])
	options = next[3] if next[3] != null else {}
	next = null
	rest()
	begin()
	rests = false


## Begins an episode, whatever was before.
func begin() -> void:
	clear()
	_reset()
	for agent in agents:
		agent.reward = 0.0


func _reset() -> void:
	reset_tick = Engine.get_physics_frames()
	arena.reset(arena.rng, options)
