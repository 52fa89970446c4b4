extends Node
## A stand-in for the Sync node of godot_rl_agents: it sends and takes the same messages, in the same order.

## Whether it speaks as plugins before 0.7 do: the spaces of one agent, no policy names, no infos.
@export var is_old := false

var peer := StreamPeerTCP.new()
var arguments := {}
var agents: Array[Node] = []
var action_repeat := 8
var ticks := 0
var n_actions := 0
## Type of the message that is sent at the next exchange.
var owes := ""


func _ready() -> void:
	process_mode = Node.PROCESS_MODE_ALWAYS
	for argument in OS.get_cmdline_args():
		if "=" in argument:
			arguments[argument.get_slice("=", 0).trim_prefix("--")] = argument.get_slice("=", 1)
	await get_parent().ready
	agents = get_tree().get_nodes_in_group("AGENT")
	seed(int(arguments["env_seed"]))
	action_repeat = int(arguments.get("action_repeat", "8"))
	Engine.physics_ticks_per_second = int(arguments["speedup"]) * 60
	Engine.time_scale = float(arguments["speedup"])
	if not agents:
		return
	peer.connect_to_host("127.0.0.1", int(arguments["port"]))
	peer.set_no_delay(true)
	while peer.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		peer.poll()
	for expected in ["handshake", "env_info"]:
		var message: Dictionary = take()
		assert(message["type"] == expected)
	var observations := agents.map(func(agent: Node) -> Dictionary: return agent.get_obs_space())
	var actions := agents.map(func(agent: Node) -> Dictionary: return agent.get_action_space())
	var info := {"type": "env_info", "n_agents": agents.size()}
	info["observation_space"] = observations[0] if is_old else observations
	info["action_space"] = actions[0] if is_old else actions
	if not is_old:
		info["agent_policy_names"] = agents.map(func(agent: Node) -> String: return agent.policy_name)
	send(info)


func _physics_process(_delta: float) -> void:
	ticks += 1
	if not agents or (ticks - 1) % action_repeat != 0:
		return
	get_tree().paused = true
	if owes == "reset":
		owes = ""
		answer({"type": "reset"})
		get_tree().paused = false
		return
	if owes == "step":
		owes = ""
		var rewards := agents.map(func(agent: Node) -> float: return agent.take_reward())
		var message := {"type": "step", "reward": rewards, "done": []}
		var seen := agents.map(func(agent: Node) -> Dictionary: return agent.get_obs())
		for agent in agents:
			message["done"].append(agent.done)
			agent.done = false
		if arguments.get("trouble") == "short" and n_actions == 3:
			rewards.pop_back()
		message["obs"] = seen
		answer(message)
	var message: Variant = take()
	while message != null and message["type"] == "call":
		var method: String = message["method"]
		send({"type": "call", "returns": agents.map(func(agent: Node) -> Variant: return agent.call(method))})
		message = take()
	if message == null or message["type"] == "close":
		get_tree().quit()
	elif message["type"] == "reset":
		for agent in agents:
			agent.needs_reset = true
		owes = "reset"
	elif message["type"] == "action":
		n_actions += 1
		for i in agents.size():
			agents[i].set_action(message["action"][i])
		if n_actions == 3:
			make_trouble(arguments.get("trouble", ""))
		owes = "step"
	get_tree().paused = false


func make_trouble(kind: String) -> void:
	if kind == "quit":
		get_tree().quit(3)
	elif kind == "loop":
		while true:
			OS.delay_msec(10)
	elif kind == "script":
		var nothing: Node = null
		nothing.queue_free()
	elif kind == "size":
		agents[-1].is_cut = true
	elif kind == "nan":
		agents[-1].draw = NAN
	elif kind == "garbage":
		peer.put_data(PackedByteArray([255, 255, 255, 255, 1, 2, 3]))
	elif kind == "text":
		peer.put_string("no JSON")


func answer(message: Dictionary) -> void:
	if not "obs" in message:
		message["obs"] = agents.map(func(agent: Node) -> Dictionary: return agent.get_obs())
	if not is_old:
		message["info"] = agents.map(func(agent: Node) -> Dictionary: return {"number": agent.number})
	send(message)


func send(message: Dictionary) -> void:
	var text := JSON.stringify(message, "", false)
	var bytes := StreamPeerBuffer.new()
	for i in 2 if arguments.get("trouble") == "twice" and n_actions == 3 and message["type"] == "step" else 1:
		bytes.put_string(text)
	peer.put_data(bytes.data_array)  # both at once


func take() -> Variant:
	while peer.get_available_bytes() == 0:
		peer.poll()
		if peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			get_tree().quit()
			return null
		OS.delay_usec(10)
	return JSON.parse_string(peer.get_string())
